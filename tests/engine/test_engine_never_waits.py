"""The host never waits for the device on the way of a step: shown without a device.

The engine runs on torch's meta device, whose tensors have no values, so that what must look at one
(`item`, `nonzero`, boolean indexing, a branch) raises. What a GPU does by a copy from memory that
is not pinned, waiting for it, is refused by its form. What the host gets back is made up. Kernels
and libraries that need a GPU, and graphs, are beyond this; tests with `-m gpu` watch those.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import make_engine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.engine.engine import Engine
from headrace.execution.token_ring import InFlight, TokenRing
from headrace.request.sampling_params import SamplingParams
from headrace.runner import assembly
from headrace.runner.model_runner import ModelRunner

META = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy.default: False, aten.copy_.default: True}  # whether the target comes first


class Waits(AssertionError):
    """The host would wait for a GPU here."""


class NeverWaiting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, Tensor] = {}  # of Python made tensors; kept, so that ids stay

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "index_put" in str(func) and id(args[2]) in self._numbers:
            raise Waits("a number that is assigned by index is copied from the host")
        if func in COPIES:
            source, target = args[0], kwargs.get("device", args[0].device)
            if COPIES[func]:
                source, target = args[1], args[0].device
            between = source.is_meta != (torch.device(target) == META)
            if between and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                raise Waits(f"a copy from {source.device} to {target}")
        result = func(*args, **kwargs)
        if func is aten.scalar_tensor.default:
            self._numbers[id(result)] = result
        return result


def on_host_only(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor and its like, which copy what they make to a given device and wait."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or "cpu") == META:
            raise Waits("a tensor is made on the host and copied")
        return make(*args, **kwargs)

    return made


class RunnerWithoutValues(ModelRunner):
    def __init__(self, config: Any, persona: Any, plan: Any, load_weights: Any) -> None:
        super().__init__(config, persona, plan, lambda model: None)
        self.device = META


def made_up(ring: TokenRing, tensors: dict[str, Tensor], own: dict[str, Tensor]) -> InFlight:
    """In place of results: token 0, finite."""
    sent = tensors | own
    host = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in sent.items()}
    if "finite" in host:
        host["finite"] = torch.ones_like(host["finite"])
    return InFlight(host=host, event=None)


@pytest.fixture(params=["llama", "gemma"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    monkeypatch.setattr(assembly, "ModelRunner", RunnerWithoutValues)
    monkeypatch.setattr(TokenRing, "send", made_up)
    return make_engine(
        folder,
        attention_backend="torch_native",
        cpu_graph="off",
        max_total_tokens=2048,
        chunked_prefill_size=48,
    )


EVERY_KIND = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=20, min_p=0.02, logprobs=40),
    SamplingParams(max_tokens=9, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=3),
    SamplingParams(max_tokens=9, logit_bias={5: 1.0, 9: -2.0}, presence_penalty=0.1),
    SamplingParams(max_tokens=9, allowed_token_ids=[0, 5, 7], bad_words=["ab"]),
    SamplingParams(max_tokens=9, logprob_token_ids=[3, 4], logprobs=1, logprobs_mode="processed"),
    SamplingParams(max_tokens=9, logprob_token_ids=list(range(40)), n=2),
    SamplingParams(max_tokens=9, return_hidden_states="last"),
    SamplingParams(max_tokens=9, return_hidden_states="all", hidden_state_layers=[0, 1, -1], n=2),
]


def test_no_step_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "tensor", on_host_only(torch.tensor))
    monkeypatch.setattr(torch, "as_tensor", on_host_only(torch.as_tensor))
    shared = list(range(100))
    handles = []
    with NeverWaiting():
        for index, params in enumerate(EVERY_KIND):
            prompt = [*shared[: 20 + 12 * index], 100 + index]
            handles.append(engine.add(prompt, params))
            engine.step()
        while not all(handle.is_finished for handle in handles):
            engine.step()
    reasons = {part.finish_reason for handle in handles for part in handle.output().outputs}
    assert reasons == {"length"}, [part.message for h in handles for part in h.output().outputs]


def waiting(part: str) -> Callable[[Tensor], object]:
    places = torch.zeros(2, dtype=torch.int64, device=META)
    return {
        "item": lambda x: x.sum().item(),
        "branch": lambda x: bool(x.any()),
        "nonzero": lambda x: x.nonzero(),
        "mask": lambda x: x[x > 0],
        "host": lambda x: x.cpu(),
        "list": lambda x: x.tolist(),
        "pageable": lambda x: x + torch.ones(3).to(META),
        "number": lambda x: x.__setitem__(places, 1.0),
        "made": lambda x: torch.tensor([1], device=x.device),
        "unknown sum": lambda x: torch.repeat_interleave(places),
    }[part]


@pytest.mark.parametrize(
    "part",
    [
        "item",
        "branch",
        "nonzero",
        "mask",
        "host",
        "list",
        "pageable",
        "number",
        "made",
        "unknown sum",
    ],
)
def test_what_waits_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "tensor", on_host_only(torch.tensor))
    act, values = waiting(part), torch.zeros(3, device=META)
    with NeverWaiting(), pytest.raises((Waits, RuntimeError, NotImplementedError)):
        act(values)
