"""Paged attention whose rows have the same bits in any batch: one kernel for decode and extend.

A tile holds the query heads of one KV head for some queries of a sequence, 64 rows of a warp
group's instruction whether they exist or not, so that a row is multiplied alike in a step of one
token and in a prompt. It takes blocks of keys from their absolute positions in ascending order, and
adds the sums of splits, whose bounds are absolute too (`invariant_splits`), in ascending order. A
program of a prompt goes through all splits of its tile; where few rows decode, programs take some
splits of a row each, leave the sum of every split, and another kernel adds them by the same
formula. Blocks and splits that a row does not see leave its bits as they are.

Meaning and shapes: `attention_twins`. Dependent launch and `tables_ready`: as in
`decode_attention_triton`.
"""

import triton
from torch import Tensor

from headrace.kernels.attention_math_triton import block_keys, check_layer, padded
from headrace.kernels.device_sizes import HOPPER_SHARED, shared_memory
from headrace.kernels.fused_math_triton import launch_options
from headrace.kernels.invariant_attention_kernels_triton import attend_kernel, combine_kernel
from headrace.kernels.invariant_splits import FIRST_KEYS, SplitScratch, most_splits, runs_of
from headrace.kernels.kept_launches_triton import KeptLaunches, aligned
from headrace.kernels.whole_blocks_triton import slots_of, takes_blocks

ROWS = 64  # of a tile: those of a warp group's instruction
EXACT_ROWS = 16  # in float32, whose products are no tensor core's
BLOCK_BYTES, STAGES = 32 * 1024, 3  # of K and V of a block; blocks in flight
SMALL_BYTES, SMALL_STAGES = 16 * 1024, 2  # the same with less shared memory than Hopper's
EARLY = 2  # blocks that a program asks for while the kernel in front works
WARPS, COMBINE_WARPS = 4, 4
UNROLLED = 8  # splits whose sums the combine kernel asks for at once


class InvariantAttention:
    """Attention of one layer, step after step, over its pages.

    Args:
        q: some queries of the layer; those of a step have their dtype, number of heads and size.
        k_cache, v_cache: the layer's keys and values. The rest: as for `paged_extend`.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
    """

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        check_layer(q, k_cache, v_cache, pdl=pdl)
        # The interpreter, on a CPU, does as Hopper does. What decides the order of sums follows the
        # model and the device.
        large = q.device.type == "cpu" or shared_memory(q.device) >= HOPPER_SHARED
        self._caches, self._heads, dim = (k_cache, v_cache), *q.shape[1:]
        self._page, self._kv_heads, self._value_dim = k_cache.shape[1], *v_cache.shape[2:]
        self._window, self._sinks, self._pdl = window, sinks, pdl
        self._stages = STAGES if large else SMALL_STAGES
        group = self._heads // self._kv_heads
        row_bytes = (padded(dim) + padded(self._value_dim)) * q.element_size()
        block = min(64, block_keys(row_bytes, BLOCK_BYTES if large else SMALL_BYTES))
        assert FIRST_KEYS % block == 0
        rows = max(padded(group), EXACT_ROWS if q.element_size() == 4 else ROWS)
        halves = q.element_size() == 2
        by_block = large and halves and all(takes_blocks(x, block) for x in self._caches)
        self._queries = rows // group
        self._habits = (
            slots_of(k_cache, block) if by_block else None,
            slots_of(v_cache, block) if by_block else None,
            scale,
            soft_cap,
            window,
        )
        self._values = {"VALUE_DIM": self._value_dim, "VALUE_PAD": padded(self._value_dim)}
        self._constants = {
            "GROUP": group,
            "ROWS": rows,
            "DIM": dim,
            "DIM_PAD": padded(dim),
            **self._values,
            "PAGE": self._page,
            "BLOCK": block,
            "K_STRIDES": k_cache.stride()[:3],
            "V_STRIDES": v_cache.stride()[:3],
            "GROWS": window is None,
        }
        self._launches: dict[tuple[bool, bool], KeptLaunches] = {}
        self._combines: dict[bool, KeptLaunches] = {}

    def decode(
        self,
        q: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        max_seq_len: int | None = None,
        runs: int | None = None,
        scratch: SplitScratch | None = None,
        tables_ready: bool = False,
    ) -> None:
        """`attention_twins.paged_decode` into `out`.

        Args:
            max_seq_len: host bound on `seq_lens`; the table's capacity if absent.
            runs: programs a row is spread over; `runs_of` chooses if absent.
            scratch: where the splits of several runs meet; allocated if absent.
            tables_ready: with `pdl`, promises that page tables and lengths are complete before
                anything of this call can start.
        """
        batch = q.shape[0]
        if batch == 0:
            return
        splits = most_splits(max_seq_len or page_table.shape[1] * self._page, window=self._window)
        if runs is None:
            runs = runs_of(batch=batch, kv_heads=self._kv_heads, splits=splits)
        parts: tuple[Tensor | None, ...] = (None, None)
        if runs > 1:
            sizes = {"batch": batch, "heads": self._heads, "splits": splits}
            sizes["value_dim"] = self._value_dim
            if scratch is None:
                scratch = SplitScratch.allocate(**sizes, device=q.device)
            assert scratch.holds(**sizes)
            parts = scratch.values, scratch.sums
        lengths = (None, None, seq_lens)
        grid = (self._kv_heads, batch, runs)
        self._launch(grid, q, page_table, lengths, out, lse, parts, splits, None, tables_ready)
        if runs > 1:
            self._combine(batch, parts, splits, seq_lens, out, lse, tables_ready)

    def extend(
        self,
        q: Tensor,
        page_table: Tensor,
        extend_start: Tensor,
        extend_lens: Tensor,
        prefix_lens: Tensor,
        *,
        max_extend: int,
        out: Tensor,
        lse: Tensor | None = None,
        covered: int | None = None,
    ) -> None:
        """`attention_twins.paged_extend` into `out`; `covered` as in `extend_attention_triton`."""
        batch = extend_lens.shape[0]
        if batch == 0 or max_extend == 0 or q.shape[0] == 0:
            return
        lengths = (extend_start, extend_lens, prefix_lens)
        grid = (triton.cdiv(max_extend, self._queries), self._kv_heads, batch)
        self._launch(grid, q, page_table, lengths, out, lse, (None, None), 1, covered, False)

    def _launch(
        self,
        grid: tuple[int, int, int],
        q: Tensor,
        page_table: Tensor,
        lengths: tuple[Tensor | None, Tensor | None, Tensor],
        out: Tensor,
        lse: Tensor | None,
        parts: tuple[Tensor | None, ...],
        splits: int,
        covered: int | None,
        tables_ready: bool,
    ) -> None:
        strides, decode = q.stride(), lengths[0] is None
        assert strides[2] == 1
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        launch = self._launches.get((decode, tables_ready))
        if launch is None:
            early = EARLY if decode and tables_ready and self._pdl else 0
            own = {"STAGES": self._stages, "DECODE": decode, "EARLY": early}
            promises = {"TABLES_READY": tables_ready, "PDL": self._pdl}
            launch = self._launches[decode, tables_ready] = KeptLaunches(
                attend_kernel,
                self._constants | own | promises,
                num_warps=WARPS,
                **launch_options(self._pdl),
            )
        launch(
            (strides, out.dtype, covered is None, aligned(q, out, lse, *parts)),
            grid,
            q,
            *self._caches,
            page_table,
            *lengths,
            self._sinks,
            out,
            lse,
            *parts,
            covered,
            *self._habits,
            page_table.stride(0),
            splits,
            *strides[:2],
        )

    def _combine(
        self,
        batch: int,
        parts: tuple[Tensor | None, ...],
        splits: int,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor | None,
        tables_ready: bool,
    ) -> None:
        combine = self._combines.get(tables_ready)
        if combine is None:
            own = {"UNROLLED": UNROLLED, "GROWS": self._window is None}
            promises = {"TABLES_READY": tables_ready, "PDL": self._pdl}
            combine = self._combines[tables_ready] = KeptLaunches(
                combine_kernel,
                self._values | own | promises,
                num_warps=COMBINE_WARPS,
                **launch_options(self._pdl),
            )
        combine(
            (out.dtype, aligned(out, lse, *parts)),
            (batch, self._heads, 1),
            *parts,
            seq_lens,
            self._sinks,
            out,
            lse,
            splits,
            self._window,
        )
