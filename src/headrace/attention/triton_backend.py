"""The paged Triton kernels as a backend: one split-KV kernel for decode, one for extend.

Importing this file needs no Triton; the kernels are imported when a backend is made.
"""

from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.attention.capabilities import AttentionCapabilities
from headrace.attention.registry import register_attention_backend
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer
from headrace.config.hardware import Hardware
from headrace.config.persona import AttentionTraits, KvGroupTraits, KvKind
from headrace.kernels.decode_splits import MAX_SPLITS, DecodeScratch
from headrace.kernels.support_triton import triton_available

DEPENDENT_LAUNCH = (9, 0)  # compute capability from which kernels may overlap
DTYPES = frozenset({"float32", "bfloat16", "float16"})


@register_attention_backend("triton")
class TritonBackend(AttentionBackend):
    """Reads pages where they lie. The kernels take their lengths from the device.

    On a CPU only Triton's interpreter runs them, which serves tests.
    """

    capabilities: ClassVar = AttentionCapabilities(
        kv_kinds=frozenset({KvKind.FULL, KvKind.WINDOW}),
        platforms=frozenset({"cuda", "cpu"}),
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        mixed_dtypes=False,
        page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
        head_dims=range(1, 257),
        sliding_window=True,
        soft_cap=True,
        sinks=True,
        graph_decode=True,
        graph_prefill=False,  # its grid follows the longest row of the step
        needs_exact_host_lengths=False,
        deterministic=False,  # the number of splits follows the batch
        speculation=False,
    )

    def __init__(
        self,
        *,
        group: KvGroupTraits,
        attention: AttentionTraits,
        page_size: int,
        max_sequences: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises `UnsupportedError` where the kernels cannot run on `device`."""
        super().__init__(
            group=group,
            attention=attention,
            page_size=page_size,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
        )
        if missing := triton_available(device.type):
            raise UnsupportedError(
                f"Attention backend triton cannot run on {device.type}",
                why=missing.reason,
                remedy=missing.remedy,
            )
        kernels = "headrace.kernels"
        self._decode: Any = import_module(f"{kernels}.decode_attention_triton").paged_decode
        self._extend: Any = import_module(f"{kernels}.extend_attention_triton").paged_extend
        self._pdl = _starts_early(device)
        self._max_seq_len = self._max_extend = 0
        self._scratch: DecodeScratch | None = None
        self._captured: list[DecodeScratch] = []

    @classmethod
    def unavailable(cls, hardware: Hardware) -> Refusal | None:
        """Assumed hardware is asked for its packages, the hardware at hand for a working one."""
        if not hardware.assumed:
            return triton_available(hardware.platform)
        if "triton" in hardware.packages:
            return None
        reason = f"Triton is not among the packages of {hardware.name}"
        return Refusal(subject="triton", reason=reason, remedy="pip install 'headrace[cuda]'")

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self._max_seq_len = max(batch.bounds.seq_lens, default=0)
        self._max_extend = max(batch.bounds.extend_lens, default=0)
        self._scratch = None

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The graph serves every length: the splits are those of the longest."""
        self._max_seq_len = self.max_model_len
        self._scratch = self._captured[-1]

    def capture_buffers(self, bucket: Bucket) -> None:
        """Scratch of the splits of `bucket`; graphs share it, since their layers follow each other.

        Scratch that an earlier graph holds is kept as long as the backend.
        """
        heads, value_dim = self.attention.num_heads, self.attention.v_head_dim
        need = {"batch": bucket.sequences, "heads": heads, "splits": MAX_SPLITS}
        if self._captured and self._captured[-1].holds(**need, value_dim=value_dim):
            return
        self._captured.append(
            DecodeScratch.allocate(**need, value_dim=value_dim, device=self.device)
        )

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
        """As `AttentionBackend.forward`; padding past the last row is left as it is in `out`."""
        keys, values = layer.pool.key_value(layer.pool_layer)
        table = batch.kv[self.group.name].page_table
        habits = {
            "scale": layer.scale,
            "window": layer.window,
            "soft_cap": layer.soft_cap,
            "sinks": layer.sinks,
            "out": out,
            "lse": lse,
            "pdl": self._pdl,
        }
        result: Tensor
        if batch.extend_start is None:
            result = self._decode(
                q,
                keys,
                values,
                table,
                batch.seq_lens,
                max_seq_len=self._max_seq_len,
                scratch=self._scratch,
                **habits,
            )
        else:
            result = self._extend(
                q,
                keys,
                values,
                table,
                batch.extend_start,
                batch.extend_lens,
                batch.prefix_lens,
                max_extend=self._max_extend,
                **habits,
            )
        return result


def _starts_early(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one in front has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= DEPENDENT_LAUNCH
