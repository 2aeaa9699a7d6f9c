"""The batch-invariant Triton kernel as a backend: what `triton` is in deterministic mode.

Every row goes through one kernel, whose results do not depend on what else is in the step, on
chunks, or on the path. Rows with one new token, which would each occupy a program of a prompt, are
spread over several programs; that changes no bit either.

Importing this file needs no Triton; the kernel is imported when a backend is made.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from headrace.attention.kept_scratch import KeptScratch
from headrace.attention.registry import register_attention_backend
from headrace.attention.triton_backend import Kernel, TritonBackend
from headrace.batch.forward_batch import ForwardBatch
from headrace.kernels.invariant_splits import SplitScratch, most_splits, runs_of


@register_attention_backend("triton")
class TritonDeterministicBackend(TritonBackend):
    """Reads pages where they lie, always: fresh keys and values are those of the pool."""

    capabilities: ClassVar = replace(TritonBackend.capabilities, deterministic=True)

    def _load_kernels(self) -> None:
        room = "headrace.kernels.invariant_attention_triton"
        self._attention: Any = import_module(room).InvariantAttention
        self._scratch = KeptScratch(SplitScratch, self.device)

    def _make_kernels(self, *tensors: Tensor, **habits: Any) -> tuple[Kernel, Kernel]:
        attention = self._attention(*tensors, **habits)
        return attention.decode, attention.extend

    def _cut_of_step(self, rows: int) -> dict[str, Any]:
        """Programs that a row is spread over, and the scratch in which its splits meet."""
        sizes, runs = self._spread(rows, self._max_seq_len)
        return {"runs": runs, "scratch": self._scratch.of_step(**sizes) if runs > 1 else None}

    def _cut_of_graph(self, batch: ForwardBatch) -> dict[str, Any]:
        """The same for a graph, in which programs find their splits by the lengths on the
        device."""
        _, runs = self._spread(batch.num_sequences, self.max_model_len)
        return {"runs": runs, "scratch": self._scratch.of_graph() if runs > 1 else None}

    def _graph_sizes(self, rows: int) -> dict[str, int] | None:
        sizes, runs = self._spread(rows, self.max_model_len)
        return sizes if runs > 1 else None

    def _spread(self, rows: int, max_seq_len: int) -> tuple[dict[str, int], int]:
        """Sizes of the scratch of so many rows, and over how many programs each is spread."""
        splits = most_splits(max_seq_len, window=self.group.window)
        runs = runs_of(batch=rows, kv_heads=self.attention.num_kv_heads, splits=splits)
        return self._sizes(rows, splits), runs
