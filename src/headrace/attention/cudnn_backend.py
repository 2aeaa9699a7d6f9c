"""Prompts that begin in a step by cuDNN's attention, everything else by the Triton kernels."""

from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention.capabilities import OTHER
from headrace.attention.fresh import (
    FreshRun,
    fresh_attention,
    fresh_runs,
    is_plain,
    read_slots,
    run_slots,
)
from headrace.attention.registry import register_attention_backend
from headrace.attention.triton_backend import TritonBackend
from headrace.base.decision import Refusal
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer
from headrace.config.hardware import Hardware

CAPABILITY = (8, 0)
MAX_HEAD_DIM = 128


@register_attention_backend("cudnn")
class CudnnBackend(TritonBackend):
    """`TritonBackend` that gives one kind of work to another kernel, cuDNN's, in torch.

    Of a step: the prompts behind its decode rows, if they all begin in it and have one length (a
    call, however many they are). Of the layers: those without window, soft cap and sinks, in half
    precision, with head sizes that cuDNN takes. On a CPU torch's own kernel stands in, for tests.
    """

    capabilities: ClassVar = TritonBackend.capabilities

    _run: FreshRun | None = None
    _slots: Tensor | None = None

    @classmethod
    def unavailable(cls, hardware: Hardware) -> Refusal | None:
        """Assumed hardware is asked for its capability, the hardware at hand for the library."""
        if missing := super().unavailable(hardware):
            if hardware.platform == "cpu":
                reason = "needs a CUDA GPU; on a CPU it runs under Triton's interpreter, for tests"
                return Refusal(subject=cls.name, reason=reason, remedy=OTHER)
            return missing
        if hardware.platform != "cuda":
            return None
        remedy = "use the triton backend"
        if hardware.capability < CAPABILITY:
            reason = "cuDNN's attention needs compute capability 8.0 or newer"
            return Refusal(subject=cls.name, reason=reason, remedy=remedy)
        if not hardware.assumed and not torch.backends.cudnn.is_available():
            return Refusal(subject=cls.name, reason="this torch has no cuDNN", remedy=remedy)
        return None

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        super().prepare_metadata(batch)
        runs = fresh_runs(batch, self._decode_rows) if self._takes_shape() else None
        self._run = runs[0] if runs is not None and len(runs) == 1 else None
        self._slots = None

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().prepare_metadata_in_graph(batch)
        self._run = None

    def _takes_shape(self) -> bool:
        """Whether cuDNN has a kernel for the layers' dtype and head sizes."""
        if self.device.type == "cpu":
            return True
        sizes = self.attention.head_dim, self.attention.v_head_dim
        half = self.dtype in (torch.bfloat16, torch.float16)
        return half and all(size % 8 == 0 and size <= MAX_HEAD_DIM for size in sizes)

    def forward(
        self,
        q: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        *,
        kv: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """As `TritonBackend.forward`."""
        run = self._run
        if run is None or lse is not None or not is_plain(layer):
            return super().forward(q, layer, batch, kv=kv, out=out, lse=lse)
        k, v = self._keys(run, layer, batch, kv)
        result = fresh_attention(q[run.tokens], k, v, run, layer.scale)
        if result.shape[0] == q.shape[0] and out is None:
            return result
        if out is None:
            out = q.new_empty(*q.shape[:2], layer.v_head_dim)
            out[self._covered :] = 0
        out[run.tokens] = result
        self._attend_in_front(q, layer, out=out, lse=None)
        return out

    def _keys(
        self,
        run: FreshRun,
        layer: AttentionLayer,
        batch: ForwardBatch,
        kv: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The run's keys and values [n, K, D], fresh or gathered from their pages."""
        if kv is not None:
            return kv[0][run.tokens], kv[1][run.tokens]
        if self._slots is None:
            self._slots = run_slots(run, batch.kv[self.group.name])
        keys, values = layer.pool.key_value(layer.pool_layer)
        return read_slots(keys, self._slots), read_slots(values, self._slots)
