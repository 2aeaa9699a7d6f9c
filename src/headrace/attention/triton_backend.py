"""The paged Triton kernels as a backend: one split-KV kernel for decode, one for extend.

In a mixed step the decode rows come first; they go through the decode kernel, since each would
occupy a whole tile of queries in the other.

Importing this file needs no Triton; the kernels are imported when a backend is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.capabilities import AttentionCapabilities
from headrace.attention.kept_scratch import KeptScratch
from headrace.attention.registry import register_attention_backend
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.protocols import AttentionLayer
from headrace.config.hardware import Hardware
from headrace.config.persona import KvKind
from headrace.kernels.decode_splits import (
    DecodeScratch,
    decode_splits,
    fair_share,
    most_runs,
)
from headrace.kernels.device_sizes import multiprocessors
from headrace.kernels.support_triton import has_dependent_launch, triton_available

DTYPES = frozenset({"float32", "bfloat16", "float16"})

Kernel = Callable[..., None]


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

    def __init__(self, setting: AttentionSetting) -> None:
        """Raises `UnsupportedError` where the kernels cannot run on the device."""
        super().__init__(setting)
        if missing := triton_available(self.device.type):
            raise UnsupportedError(
                f"Attention backend triton cannot run on {self.device.type}",
                why=missing.reason,
                remedy=missing.remedy,
            )
        self._load_kernels()
        self._layers: dict[tuple[Any, ...], LayerKernels] = {}
        self._pdl = has_dependent_launch(self.device)
        self._tables_ready = False
        self._decode_rows = 0  # leading rows of a mixed step that the decode kernel takes
        self._front: tuple[Tensor, ...] = ()  # their page table and lengths
        self._behind: tuple[Tensor, ...] = ()  # of the others: page table, start, extend, prefix
        self._max_seq_len = self._max_extend = 0
        self._covered = 0  # leading tokens of a step that belong to rows
        self._cut: dict[str, Any] = {}  # how the decode kernel cuts rows over programs

    def _load_kernels(self) -> None:
        kernels = "headrace.kernels"
        self._decode: Any = import_module(f"{kernels}.decode_attention_triton").LayerDecode
        self._extend: Any = import_module(f"{kernels}.extend_attention_triton").LayerExtend
        self._scratch: KeptScratch[Any] = KeptScratch(DecodeScratch, self.device)

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
        rows = decode_rows(batch)
        self._decode_rows, self._tables_ready = rows, False
        self._front, self._behind = parts_of(batch, self.group.name, rows)
        self._max_seq_len = max(batch.bounds.seq_lens[:rows], default=1)
        self._max_extend = max(batch.bounds.extend_lens[rows:], default=0)
        self._covered = sum(batch.bounds.extend_lens)
        self._cut = self._cut_of_step(rows)

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The graph serves every length: what is cut by lengths is cut on the device.

        Between the graph's preparation and the first layer lies the embedding, which is launched
        without dependent launch: the tables are complete before any layer starts.
        """
        self._max_seq_len, self._tables_ready = self.max_model_len, True
        self._front, self._behind = parts_of(batch, self.group.name, batch.num_sequences)
        self._cut = self._cut_of_graph(batch)

    def capture_buffers(self, bucket: Bucket) -> None:
        """Scratch in which the splits of the bucket's rows meet, where there are several."""
        sizes = self._graph_sizes(bucket.sequences)
        if sizes is not None:
            self._scratch.capture(**sizes)

    def _cut_of_step(self, rows: int) -> dict[str, Any]:
        """Further arguments of the decode kernel: scratch for a layer without window, which is cut
        into the most splits; the kernel finds their number itself."""
        splits = decode_splits(
            batch=rows,
            kv_heads=self.attention.num_kv_heads,
            max_seq_len=self._max_seq_len,
            multiprocessors=multiprocessors(self.device),
        )
        sizes = self._sizes(rows, splits)
        return {"scratch": self._scratch.of_step(**sizes) if splits > 1 else None}

    def _cut_of_graph(self, batch: ForwardBatch) -> dict[str, Any]:
        """The same for a graph, whose rows are cut by their share of all keys."""
        splits = self._graph_splits(batch.num_sequences)
        if splits == 1:
            return {"splits": 1}
        share = fair_share(
            batch.seq_lens,
            kv_heads=self.attention.num_kv_heads,
            multiprocessors=multiprocessors(self.device),
            window=self.group.window,
        )
        return {"splits": splits, "share": share, "scratch": self._scratch.of_graph()}

    def _graph_splits(self, rows: int) -> int:
        return most_runs(batch=rows, kv_heads=self.attention.num_kv_heads)

    def _graph_sizes(self, rows: int) -> dict[str, int] | None:
        """Sizes of the scratch of a graph; `None` where it needs none."""
        splits = self._graph_splits(rows)
        return self._sizes(rows, splits) if splits > 1 else None

    def _sizes(self, rows: int, splits: int) -> dict[str, int]:
        heads, value_dim = self.attention.num_heads, self.attention.v_head_dim
        return {"batch": rows, "heads": heads, "splits": splits, "value_dim": value_dim}

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
        if batch.extend_start is None:
            if out is None:
                out = q.new_empty(*q.shape[:2], layer.v_head_dim)
            self._attend_one_each(q, layer, out=out, lse=lse)
            return out
        if out is None:
            out = q.new_empty(*q.shape[:2], layer.v_head_dim)
            out[self._covered :] = 0
        self._attend_in_front(q, layer, out=out, lse=lse)
        self._attend_many_each(q, layer, out=out, lse=lse)
        return out

    def _attend_in_front(
        self, q: Tensor, layer: AttentionLayer, *, out: Tensor, lse: Tensor | None
    ) -> None:
        """The leading rows of a mixed step that have one new token each."""
        rows = self._decode_rows
        if rows > 0:
            lse = None if lse is None else lse[:rows]
            self._attend_one_each(q[:rows], layer, out=out[:rows], lse=lse)

    def _attend_one_each(
        self, q: Tensor, layer: AttentionLayer, *, out: Tensor, lse: Tensor | None
    ) -> None:
        """The decode kernel over the rows in front."""
        self._kernels(q, layer).decode(
            q,
            *self._front,
            max_seq_len=self._max_seq_len,
            tables_ready=self._tables_ready,
            **self._cut,
            out=out,
            lse=lse,
        )

    def _attend_many_each(
        self, q: Tensor, layer: AttentionLayer, *, out: Tensor, lse: Tensor | None
    ) -> None:
        """The extend kernel over the rows behind those in front; every token of them is written."""
        self._kernels(q, layer).extend(
            q,
            *self._behind,
            max_extend=self._max_extend,
            out=out,
            lse=lse,
            covered=self._covered,
        )

    def _kernels(self, q: Tensor, layer: AttentionLayer) -> "LayerKernels":
        """Those of the layer's pool and habits, made at its first call."""
        keys, values = layer.pool.key_value(layer.pool_layer)
        sinks = layer.sinks
        known = (id(keys), layer.scale, layer.window, layer.soft_cap, id(sinks))
        kernels = self._layers.get(known)
        if kernels is None:
            decode, extend = self._make_kernels(
                q,
                keys,
                values,
                scale=layer.scale,
                window=layer.window,
                soft_cap=layer.soft_cap,
                sinks=sinks,
                pdl=self._pdl,
            )
            kernels = LayerKernels(decode=decode, extend=extend, tensors=(keys, sinks))
            self._layers[known] = kernels
        return kernels

    def _make_kernels(self, *tensors: Tensor, **habits: Any) -> tuple[Kernel, Kernel]:
        """For one new token a row, and for several; arguments as of `LayerDecode`."""
        return self._decode(*tensors, **habits), self._extend(*tensors, **habits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernels:
    """Kernels that know a layer's pool and habits; `tensors` keeps the ids that they go by."""

    decode: Kernel
    extend: Kernel
    tensors: tuple[Tensor, Tensor | None]


def parts_of(
    batch: ForwardBatch, group: str, rows: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What the kernels read of the first `rows` rows, and of those behind."""
    table = batch.kv[group].page_table
    front = (table[:rows], batch.seq_lens[:rows])
    if batch.extend_start is None:
        return front, ()
    assert batch.extend_lens is not None
    assert batch.prefix_lens is not None
    behind = (table, batch.extend_start, batch.extend_lens, batch.prefix_lens)
    return front, tuple(each[rows:] for each in behind)


def decode_rows(batch: ForwardBatch) -> int:
    """How many rows go through the decode kernel: all, or those in front with one new token.

    Row i of them has token i. A prompt's last token behind them is such a row as well.
    """
    new_tokens = batch.bounds.extend_lens
    if batch.mode is not ForwardMode.MIXED:
        return len(new_tokens) if batch.mode.is_decode else 0
    return next((row for row, new in enumerate(new_tokens) if new != 1), len(new_tokens))
