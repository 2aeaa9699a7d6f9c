"""FlashAttention 3 of the package sglang-kernel (module `sgl_kernel`) as a backend, for Hopper.

One call serves all kinds of steps; it takes lengths and pages from the device, splits the keys
by itself and comes compiled, so that nothing is planned and nothing is waited for.

Importing this file needs no sgl_kernel; the package is imported when a backend is made.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.capabilities import OTHER, AttentionCapabilities
from headrace.attention.optional_package import OptionalPackage
from headrace.attention.registry import register_attention_backend
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer
from headrace.batch.transfer import to_device
from headrace.config.hardware import Hardware
from headrace.config.persona import KvKind
from headrace.kernels.device_sizes import HOPPER

PACKAGE = OptionalPackage(backend="fa3", module="sgl_kernel", install="pip install sglang-kernel")
DTYPES = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Pages and lengths of the rows: `table` [B, pages] and `lengths` [B], int32."""

    table: Tensor
    lengths: Tensor


@register_attention_backend("fa3")
class FlashAttention3Backend(AttentionBackend):
    """Lengths and pages are the device's; the host's bounds only size the launch.

    A window's layers are given pages from the first that some query sees: the kernel reads whole
    blocks of keys, and what it masks must still be numbers, which freed pages may not hold.
    """

    capabilities: ClassVar = AttentionCapabilities(
        kv_kinds=frozenset({KvKind.FULL, KvKind.WINDOW}),
        platforms=frozenset({"cuda"}),
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        mixed_dtypes=False,
        # Pages of 128 are copied whole by the tensor copy engine, never-written tails included.
        page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64}),
        head_dims=frozenset({64, 96, 128, 256}),
        sliding_window=True,
        soft_cap=True,
        sinks=False,  # the kernel takes them in bfloat16 only
        graph_decode=True,
        graph_prefill=False,  # its grid follows the longest row of the step
        needs_exact_host_lengths=False,
        deterministic=False,  # the number of splits follows the batch
        speculation=False,
        mixed_head_dims=False,
    )

    def __init__(self, setting: AttentionSetting) -> None:
        """Raises `UnsupportedError` where sgl_kernel cannot be imported."""
        super().__init__(setting)
        self._attend: Any = PACKAGE.load(".flash_attn").flash_attn_with_kvcache
        self._one_each = self._starts_of_decode(setting.max_sequences)
        self._captured: dict[int, Tensor] = {}  # the same, by rows of a graph
        self._starts = self._one_each[:1]  # [B + 1] int32, first token of each row, and the end
        self._tokens = 0
        self._max_new = 0
        self._keys: dict[int | None, _Keys] = {}

    @classmethod
    def unavailable(cls, hardware: Hardware) -> Refusal | None:
        if hardware.platform == "cuda" and hardware.capability != HOPPER:
            reason = f"is for compute capability {HOPPER}, not {hardware.capability}"
            return Refusal(subject=cls.name, reason=reason, remedy=OTHER)
        return PACKAGE.refusal(hardware)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        new = batch.bounds.extend_lens
        self._keys = {}
        self._tokens, self._max_new = sum(new), max(new, default=0)
        if batch.extend_start is None:
            self._starts = self._one_each[: len(new) + 1]
        else:
            end = to_device(torch.tensor([self._tokens], dtype=torch.int32), self.device)
            self._starts = torch.cat((batch.extend_start, end))
        if self._tokens > 0:
            self._keys_of(self.group.window, batch)

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        rows = batch.seq_lens.shape[0]
        self._keys = {}
        self._tokens, self._max_new = rows, 1
        self._starts = self._captured[rows]
        self._keys_of(self.group.window, batch)

    def capture_buffers(self, bucket: Bucket) -> None:
        """The rows' starts; the graph's own memory holds everything else."""
        rows = bucket.sequences
        if rows not in self._captured:
            self._captured[rows] = self._starts_of_decode(rows)

    def _starts_of_decode(self, rows: int) -> Tensor:
        return torch.arange(rows + 1, dtype=torch.int32, device=self.device)

    def _keys_of(self, window: int | None, batch: ForwardBatch) -> _Keys:
        """Pages and lengths that layers with this window get, by device operations."""
        if window not in self._keys:
            table = batch.kv[self.group.name].page_table
            keys = _Keys(table=table, lengths=batch.seq_lens)
            if window is not None:
                first_query = batch.seq_lens - 1 if batch.prefix_lens is None else batch.prefix_lens
                first = (first_query - window + 1).clamp(min=0) // self.page_size  # [B]
                seen = -(-(window + self._max_new - 1) // self.page_size) + 1
                column = torch.arange(min(seen, table.shape[1]), device=table.device)
                place = (first[:, None] + column).clamp(max=table.shape[1] - 1)
                keys = _Keys(
                    table=table.gather(1, place.long()),
                    lengths=batch.seq_lens - first * self.page_size,
                )
            self._keys[window] = keys
        return self._keys[window]

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
        _check_layout(keys, values)
        tokens = self._tokens
        if out is None:
            make = q.new_empty if tokens == q.shape[0] else q.new_zeros
            out = make(*q.shape[:2], layer.v_head_dim)
        if tokens == 0:
            return out
        seen = self._keys_of(layer.window, batch)
        _, sums, *_ = self._attend(
            q[:tokens],
            keys,
            values,
            cache_seqlens=seen.lengths,
            page_table=seen.table,
            cu_seqlens_q=self._starts,
            max_seqlen_q=self._max_new,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(-1, -1) if layer.window is None else (layer.window - 1, 0),
            softcap=layer.soft_cap or 0.0,
            return_softmax_lse=True,
            out=out[:tokens],
        )
        if lse is not None:
            lse[:tokens] = sums.T  # [N, T]
        return out


def _check_layout(keys: Tensor, values: Tensor) -> None:
    """Any strides of page, token and head will do, so NHD and HND alike."""
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise UnsupportedError(
            "Attention backend fa3 cannot read this KV pool",
            why=f"numbers of a head lie {keys.stride(3)} and {values.stride(3)} apart, not 1",
            remedy=OTHER,
        )
