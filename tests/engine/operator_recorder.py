"""A recorder for devices without graphs: operators are kept as they are called, and called again.

Like a graph it holds addresses and numbers, not Python: what a replay computes goes to where the
recorded call left its results. What a body would decide anew in Python, it does not see.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.execution.segments import Replay
from headrace.kernels.compile_ahead_triton import CompiledKernels


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        places = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        self.calls.append((func, args, kwargs or {}, places))
        return results

    def replay(self) -> None:
        for func, args, kwargs, places in self.calls:
            results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for place, result in zip(places, results, strict=True):
                if result.data_ptr() != place.data_ptr():  # neither a view nor in place
                    place.copy_(result)


class OperatorRecorder:
    """Records on any device, for tests."""

    def __init__(self) -> None:
        self.sessions = self.replays = 0
        self._calls: _Calls | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        self.sessions += 1
        yield

    def begin(self) -> None:
        assert self._calls is None
        self._calls = _Calls()
        self._calls.__enter__()

    def end(self) -> Replay:
        calls = self._calls
        assert calls is not None
        calls.__exit__(None, None, None)
        self._calls = None

        def replay() -> None:
            self.replays += 1
            calls.replay()

        return replay

    def place_of(self, tensor: Tensor) -> Tensor:
        assert self._calls is None, "between segments, or behind the last"
        return tensor

    def held_bytes(self) -> int:
        return self.sessions


def refuse_nothing(*_: Any) -> None:
    """In place of the check that there is a CUDA device."""


def compile_nothing(*_: Any, **__: Any) -> CompiledKernels:
    """In place of compiling kernels ahead for a CUDA device."""
    return CompiledKernels(compiled=(), found=(), seconds=0.0)


def as_if_on_a_gpu(monkeypatch: Any) -> None:
    """Plans admit prefill graphs, and runners record with `OperatorRecorder`."""
    monkeypatch.setattr("headrace.runner.dry_steps.compile_ahead", compile_nothing)
    monkeypatch.setattr("headrace.runner.choices.prefill_graph._refusal", refuse_nothing)
    monkeypatch.setattr("headrace.runner.forward_paths.GraphRecorder", OperatorRecorder)
