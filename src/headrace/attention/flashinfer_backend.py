"""FlashInfer's paged prefill kernel as a backend, for prompts, mixed steps and decode alike.

One kernel serves all: of a decode step its tensor-core tile takes the query heads of a KV head as
rows (what FlashInfer's own decode wrapper does with `use_tensor_cores`). FlashInfer compiles a
kernel with nvcc and ninja when one is first used and caches it; one kernel, of its generation
`fa2`, for all steps is the least to wait for. `fa3`, its Hopper generation, takes several times as
long to compile. Each dtype, head dimension, window or none, soft cap or none is another kernel.

Importing this file needs no FlashInfer; the package is imported when a backend is made.
"""

import math
from collections.abc import Callable
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
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.protocols import AttentionLayer
from headrace.batch.transfer import to_device
from headrace.config.hardware import Hardware
from headrace.config.persona import KvKind
from headrace.kernels.device_sizes import multiprocessors

PACKAGE = OptionalPackage(
    backend="flashinfer", module="flashinfer", install="pip install flashinfer-python"
)
DTYPES = frozenset({"bfloat16", "float16"})
LN_2 = math.log(2)

# Facts of FlashInfer 0.6.12's planner: it splits keys only while the tiles of queries fill less
# than two blocks a multiprocessor; a tile has 128 rows at most, 16 in a graph of decode steps with
# up to 16 query heads a KV head, 64 with more. The parts of a split are float32.
BLOCKS_PER_MULTIPROCESSOR = 2
LARGEST_TILE = 128
GRAPH_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Habits:
    """What a plan is made for; layers that share it share the plan."""

    window: int | None
    soft_cap: float | None
    scale: float


@dataclass(slots=True, kw_only=True)
class _Step:
    """Where the pages and queries of a step lie, in FlashInfer's words.

    Attributes:
        tokens: queries, without padding at the end.
        indices: [pages] int32, the pages of all rows after each other, on the device.
        dead: [tokens] bool, queries of rows that have ended or are padding; `None` where none can.
        wrappers: plans of this step.
        plan: makes a wrapper ready for habits.
    """

    tokens: int
    indices: Tensor
    dead: Tensor | None
    wrappers: dict[_Habits, Any]
    plan: Callable[[_Habits], Any]


@register_attention_backend("flashinfer")
class FlashInferBackend(AttentionBackend):
    """Plans a step from the host's lengths, a graph from the longest possible.

    FlashInfer's plan cuts the work by lengths that the host gives. Of live rows these are exact; a
    row that has ended counts one token too many, whose slot was never written: its result is
    replaced by 0. In a graph the kernel reads lengths and pages that device operations write, under
    a plan for rows of `max_model_len`, whose parts past a row's end are empty.
    """

    capabilities: ClassVar = AttentionCapabilities(
        kv_kinds=frozenset({KvKind.FULL, KvKind.WINDOW}),
        platforms=frozenset({"cuda"}),
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        mixed_dtypes=False,
        page_sizes=None,
        head_dims=frozenset({64, 128, 256}),
        sliding_window=True,
        soft_cap=True,
        sinks=False,
        graph_decode=True,
        graph_prefill=False,  # a plan is for one number of tokens a row
        needs_exact_host_lengths=False,
        deterministic=False,  # the splits follow the batch
        speculation=False,
        mixed_head_dims=False,
    )

    def __init__(self, setting: AttentionSetting) -> None:
        """Raises `UnsupportedError` where FlashInfer cannot be imported."""
        super().__init__(setting)
        self._wrapper: Any = PACKAGE.load().BatchPrefillWithPagedKVCacheWrapper
        self._units = multiprocessors(self.device)
        self._workspaces: list[Tensor] = []  # graphs keep the ones that they were captured with
        self._eager: dict[_Habits, Any] = {}
        self._graphs: dict[int, _GraphSteps] = {}
        self._copied: torch.cuda.Event | None = None
        self._step: _Step | None = None

    @classmethod
    def unavailable(cls, hardware: Hardware) -> Refusal | None:
        if hardware.platform == "cuda" and hardware.capability < (8, 0):
            reason = f"has no kernel for compute capability {hardware.capability}, only from (8, 0)"
            return Refusal(subject=cls.name, reason=reason, remedy=OTHER)
        return PACKAGE.refusal(hardware)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        new, total = (
            torch.tensor(lengths, dtype=torch.int32)
            for lengths in (batch.bounds.extend_lens, batch.bounds.seq_lens)
        )
        pages = (total + self.page_size - 1) // self.page_size  # [B]
        last = total - (pages - 1).clamp(min=0) * self.page_size
        starts, page_starts = _starts(new), _starts(pages)
        indices = torch.empty(int(page_starts[-1]) + 1, dtype=torch.int32, device=self.device)
        if indices.shape[0] > 1:
            _compact(batch.kv[self.group.name].page_table, to_device(pages, self.device), indices)

        def plan(habits: _Habits) -> Any:
            if habits not in self._eager:
                self._eager[habits] = self._wrapper(
                    self._workspace(self._eager_bytes()), "NHD", backend="fa2"
                )
            wrapper = self._eager[habits]
            self._plan(wrapper, habits, starts, page_starts, indices[:-1], last)
            return wrapper

        self._step = _Step(
            tokens=int(starts[-1]),
            indices=indices,
            dead=self._dead_tokens(batch, new, total),
            wrappers={},
            plan=plan,
        )
        if self._step.tokens > 0:
            self._ready(self._group_habits())

    def _dead_tokens(self, batch: ForwardBatch, new: Tensor, total: Tensor) -> Tensor | None:
        """[tokens] bool. A row ends by a token that it sampled: none can in a step of prompts."""
        if batch.mode is ForwardMode.EXTEND or len(new) == 0:
            return None
        ended = batch.seq_lens < to_device(total.clamp(min=1), self.device)  # [B]
        if batch.mode.is_decode:
            return ended
        owner = torch.repeat_interleave(torch.arange(len(new)), new)
        return ended[to_device(owner, self.device)]

    def capture_buffers(self, bucket: Bucket) -> None:
        """The plan of a bucket; the variants of its graph share it."""
        rows = bucket.sequences
        if rows not in self._graphs:
            self._graphs[rows] = _GraphSteps.allocate(
                rows, pages=-(-self.max_model_len // self.page_size), device=self.device
            )
            self._step = self._graph_step(rows)
            self._ready(self._group_habits())

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        rows = batch.seq_lens.shape[0]
        self._graphs[rows].load(
            batch.seq_lens, batch.kv[self.group.name].page_table, self.page_size
        )
        self._step = self._graph_step(rows)

    def _graph_step(self, rows: int) -> _Step:
        """The step of the graph of `rows`; its plan takes every row for a longest one."""
        graph = self._graphs[rows]

        def plan(habits: _Habits) -> Any:
            wrapper = self._wrapper(
                self._workspace(self._graph_bytes(rows)),
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=graph.starts,
                paged_kv_indptr_buf=graph.page_starts,
                paged_kv_indices_buf=graph.indices,
                paged_kv_last_page_len_buf=graph.last,
                backend="fa2",
            )
            # The workspace of a plan that FlashInfer allocates is 8 MiB, too much for each bucket.
            wrapper.reset_workspace_buffer(
                self._workspaces[-1],
                torch.zeros(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=self.device),
            )
            pages = torch.full((rows,), graph.pages, dtype=torch.int32)
            last = torch.full_like(pages, self.max_model_len - (graph.pages - 1) * self.page_size)
            ones = torch.ones_like(pages)
            self._plan(wrapper, habits, _starts(ones), _starts(pages), graph.indices[:0], last)
            return wrapper

        return _Step(
            tokens=rows, indices=graph.indices, dead=None, wrappers=graph.wrappers, plan=plan
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
        assert self._step is not None, "prepare_metadata comes first"
        keys, values = layer.pool.key_value(layer.pool_layer)
        _check_layout(keys, values)
        tokens = self._step.tokens
        if out is None:
            make = q.new_empty if tokens == q.shape[0] else q.new_zeros
            out = make(*q.shape[:2], layer.v_head_dim)
        if tokens == 0:
            return out
        result, sums = out[:tokens], None if lse is None else lse[:tokens]
        wrapper = self._ready(_Habits(layer.window, layer.soft_cap, layer.scale))
        wrapper.run(q[:tokens], (keys, values), out=result, lse=sums, return_lse=sums is not None)
        dead = self._step.dead
        if dead is not None:
            result.masked_fill_(dead[:, None, None], 0)
        if sums is not None:
            sums.mul_(LN_2)  # FlashInfer's are of base 2
            if dead is not None:
                sums.masked_fill_(dead[:, None], -math.inf)
        return out

    def _group_habits(self) -> _Habits:
        return _Habits(self.group.window, self.attention.soft_cap, self.attention.scale)

    def _ready(self, habits: _Habits) -> Any:
        """The wrapper of habits, planned for this step."""
        assert self._step is not None
        wrapper = self._step.wrappers.get(habits)
        if wrapper is None:
            wrapper = self._step.wrappers[habits] = self._step.plan(habits)
        return wrapper

    def _plan(
        self,
        wrapper: Any,
        habits: _Habits,
        starts: Tensor,
        page_starts: Tensor,
        indices: Tensor,
        last: Tensor,
    ) -> None:
        """Starts [B + 1], page starts [B + 1] and last page lengths [B] on the host, int32."""
        if self._copied is not None:
            # A plan is copied to the device from memory that the next one overwrites.
            self._copied.synchronize()
        wrapper.plan(
            starts,
            page_starts,
            indices,
            last,
            self.attention.num_heads,
            self.attention.num_kv_heads,
            self.attention.head_dim,
            self.page_size,
            causal=True,
            sm_scale=habits.scale,
            window_left=-1 if habits.window is None else habits.window - 1,
            logits_soft_cap=habits.soft_cap,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _eager_bytes(self) -> int:
        """Parts of the largest split: as many tiles as there is room for."""
        tiles = BLOCKS_PER_MULTIPROCESSOR * self._units // self.attention.num_kv_heads
        return self._part_bytes(max(1, tiles) * LARGEST_TILE)

    def _graph_bytes(self, rows: int) -> int:
        """A plan in a graph always splits, and counts a tile more for each row than it has."""
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        tile = 16 if heads // kv_heads <= 16 else 64 if heads // kv_heads <= 64 else LARGEST_TILE
        tiles = -(-rows * heads // kv_heads // tile) + rows
        most = BLOCKS_PER_MULTIPROCESSOR * self._units // kv_heads
        return self._part_bytes(max(tiles, most) * tile)

    def _part_bytes(self, rows: int) -> int:
        """Values and lse of `rows` partial results of every head, in float32."""
        sizes = self.attention.num_heads * (self.attention.v_head_dim + 1)
        return rows * sizes * torch.float32.itemsize + (1 << 10)  # and their alignment

    def _workspace(self, size: int) -> Tensor:
        """At least `size` bytes; steps and graphs follow each other, so that they share it."""
        if not self._workspaces or self._workspaces[-1].shape[0] < size:
            self._workspaces.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return self._workspaces[-1]


@dataclass(slots=True, kw_only=True)
class _GraphSteps:
    """Buffers that the kernels of a graph of B rows read, and the plans over them.

    Attributes:
        pages: of the longest row.
        starts, page_starts: [B + 1] int32. last: [B] int32, tokens in each row's last page.
        indices: [B * pages + 1] int32; the last place takes what belongs to no row.
    """

    pages: int
    starts: Tensor
    page_starts: Tensor
    last: Tensor
    indices: Tensor
    wrappers: dict[_Habits, Any]

    @classmethod
    def allocate(cls, rows: int, *, pages: int, device: torch.device) -> "_GraphSteps":
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        return cls(
            pages=pages,
            starts=starts,
            page_starts=torch.zeros_like(starts),
            last=torch.zeros(rows, dtype=torch.int32, device=device),
            indices=torch.zeros(rows * pages + 1, dtype=torch.int32, device=device),
            wrappers={},
        )

    def load(self, seq_lens: Tensor, table: Tensor, page_size: int) -> None:
        """Lengths [B] and pages [B, max pages] of a step, by device operations."""
        pages = (seq_lens + page_size - 1) // page_size
        self.last.copy_(seq_lens - (pages - 1).clamp(min=0) * page_size)
        torch.cumsum(pages, 0, dtype=torch.int32, out=self.page_starts[1:])
        _compact(table, pages, self.indices)


def _starts(counts: Tensor) -> Tensor:
    """[B] -> [B + 1] int32, where each row starts, and the end."""
    return torch.nn.functional.pad(torch.cumsum(counts, 0, dtype=torch.int32), (1, 0))


def _compact(table: Tensor, pages: Tensor, indices: Tensor) -> None:
    """Writes the first `pages` [B] of each row of table [B, max pages] after each other.

    Device operations of fixed sizes; the last place of `indices` takes the rest of the table.
    """
    column = torch.arange(table.shape[1], device=table.device)
    place = (torch.cumsum(pages, 0) - pages)[:, None] + column  # [B, max pages] int64
    place = torch.where(column < pages[:, None], place, indices.shape[0] - 1)
    indices.scatter_(0, place.flatten(), table.flatten())


def _check_layout(keys: Tensor, values: Tensor) -> None:
    """Any strides of page, token and head will do (so NHD and HND alike), the same for both."""
    if keys.stride() != values.stride() or keys.stride(3) != 1:
        raise UnsupportedError(
            "Attention backend flashinfer cannot read this KV pool",
            why=f"strides of keys {keys.stride()} and values {values.stride()} differ, or those of"
            " a head's numbers are not 1",
            remedy=OTHER,
        )
