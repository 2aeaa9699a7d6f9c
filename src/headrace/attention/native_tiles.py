"""Cuts a step into tiles of similar rows: which queries, which slots, which mask.

A tile is [b rows, E queries, C keys], padded to its longest row. Rows are grouped by the powers of
two of their new tokens and of their keys, so that padding at most doubles either; long prompts are
cut into several tiles of queries, each with the keys that its queries can see and no more. A tile
is made once per step and serves all layers of a KV group.

No slot that a row does not own is ever read: past a row's last token its key columns repeat that
token, masked, so NaN in the padding page, in the tail of a page or in free pages reaches nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch, KvGroup
from headrace.batch.transfer import to_device

SHORT_KEYS = 256  # below this many keys rows share a tile whatever their lengths
TILE_QUERIES = 256
MASK_ELEMENTS = 1 << 22  # of one tile
# Keys of one tile, [b, C, K, D]. On a CPU what is gathered stays in a cache until it is used: the
# best of 2^16 to 2^21 for 16 rows of 128 to 256 tokens of SmolLM2-135M, and a row alone is faster
# read in place at 200 tokens, slower at 2000 (2 cores of an EPYC with AVX-512, 2026-11-29).
# Elsewhere large tiles keep the device busy.
GATHER_ELEMENTS = {"cpu": 1 << 19}
GATHER_ELEMENTS_ELSEWHERE = 1 << 24
IN_PLACE_ELEMENTS = 1 << 16
STEP_MASK_ELEMENTS = 1 << 24  # of all tiles of a step; beyond it masks are made again per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Queries and keys of some rows.

    Attributes:
        rows, queries, keys: b, E, C.
        tokens: [b * E] int64 place of each query among the step's tokens (a slice if they follow
            each other); a padded query repeats its row's last.
        real: [n] int64, places in [b * E] of queries that are not padding; `None` for all.
        slots: [b * C] int64; a slice where one short row's slots follow each other, so that it is
            read in place.
        position: [b, E] int32 of the queries. first: [b] int32, position of key column 0.
        dead: [b, E] bool, queries that see nothing; `None` when there are none.
        mask: [b, 1, E, C], 0 or -inf; `None` when nothing is masked or `mask_later`.
    """

    rows: int
    queries: int
    keys: int
    tokens: Tensor | slice
    real: Tensor | None
    slots: Tensor | slice
    position: Tensor
    first: Tensor
    window: int | None
    dead: Tensor | None
    mask: Tensor | None
    mask_later: bool

    def clear_dead(self, result: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Result [b * E, N, Dv] and lse [b * E, N], 0 and -inf where a query sees nothing."""
        if self.dead is None:
            return result, lse
        dead = self.dead.flatten()
        if lse is not None:
            lse = lse.masked_fill(dead[:, None], float("-inf"))
        return result.masked_fill(dead[:, None, None], 0), lse

    def covers(self, tokens: int) -> bool:
        """Whether its queries are all the step's tokens, in their order."""
        return isinstance(self.tokens, slice) and self.rows * self.queries == tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Host bounds of one row.

    Attributes:
        index: place in the batch. start: place of its first new token.
        new: new tokens. prefix: tokens before them. first: position of its first key: the first
            that a query of it sees, or the border of a block before it.
    """

    index: int
    start: int
    new: int
    prefix: int
    first: int

    @property
    def keys(self) -> int:
        return max(1, self.prefix + self.new - self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Queries [start, stop) of each of `rows`, over the key columns [low, high)."""

    rows: tuple[_Row, ...]
    start: int
    stop: int
    low: int
    high: int

    @property
    def mask_elements(self) -> int:
        return len(self.rows) * (self.stop - self.start) * (self.high - self.low)


def make_tiles(
    batch: ForwardBatch,
    group: str,
    *,
    window: int | None,
    key_elements: int,
    dtype: torch.dtype,
    tile_queries: int = TILE_QUERIES,
    key_block: int = 1,
) -> tuple[Tile, ...]:
    """The tiles of a step that cover every token of every row.

    Args:
        window: keys a query sees, itself included.
        key_elements: K * D, for the bound on the size of a tile.
        dtype: of the queries, which the mask shares.
        tile_queries: queries of a row in a tile at most.
        key_block: the keys of every row of a tile begin at a position that is a multiple of it, and
            their number is one.
    """
    cuts = tuple(_cuts(batch, window, key_elements, tile_queries, key_block))
    mask_later = sum(cut.mask_elements for cut in cuts) > STEP_MASK_ELEMENTS
    kv = batch.kv[group]
    in_place = IN_PLACE_ELEMENTS // key_elements if key_block == 1 else 0
    return tuple(
        _tile(batch, kv, cut, window, dtype, mask_later, in_place, key_block) for cut in cuts
    )


def tile_mask(tile: Tile, dtype: torch.dtype) -> Tensor | None:
    """The mask of a tile, [b, 1, E, C]; made here when the tile does not hold it."""
    if not tile.mask_later:
        return tile.mask
    return _mask(tile.position, tile.first, tile.keys, tile.window, dtype)


def _rows(batch: ForwardBatch, window: int | None, key_block: int) -> Iterator[_Row]:
    start = 0
    lengths = zip(batch.bounds.seq_lens, batch.bounds.extend_lens, strict=True)
    for index, (total, new) in enumerate(lengths):
        prefix = total - new
        first = 0 if window is None else max(0, prefix - window + 1) // key_block * key_block
        if new > 0:
            yield _Row(index=index, start=start, new=new, prefix=prefix, first=first)
        start += new


def _cuts(
    batch: ForwardBatch,
    window: int | None,
    key_elements: int,
    tile_queries: int,
    key_block: int,
) -> Iterator[_Cut]:
    device = batch.seq_lens.device.type
    gather = GATHER_ELEMENTS.get(device, GATHER_ELEMENTS_ELSEWHERE) // key_elements
    alike: dict[tuple[int, int], list[_Row]] = {}
    for row in _rows(batch, window, key_block):
        key = (row.new - 1).bit_length(), (max(row.keys, SHORT_KEYS) - 1).bit_length()
        alike.setdefault(key, []).append(row)
    for rows in alike.values():
        queries, keys = max(row.new for row in rows), max(row.keys for row in rows)
        step = max(1, min(queries, tile_queries, MASK_ELEMENTS // keys))
        together = max(1, min(gather, MASK_ELEMENTS // step) // keys)
        if together < len(rows):
            rows.sort(key=lambda row: row.keys)
        for begin in range(0, len(rows), together):
            yield from _query_cuts(tuple(rows[begin : begin + together]), step, window, key_block)


def _query_cuts(
    rows: tuple[_Row, ...], step: int, window: int | None, key_block: int
) -> Iterator[_Cut]:
    queries, keys = max(row.new for row in rows), max(row.keys for row in rows)
    before = [row.prefix - row.first for row in rows]  # key columns before the first query's own
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        low = 0 if window is None else max(0, min(before) + start - window + 1)
        low = low // key_block * key_block
        high = low + -(-(min(keys, max(1, max(before) + stop)) - low) // key_block) * key_block
        yield _Cut(rows=rows, start=start, stop=stop, low=low, high=high)


def _tile(
    batch: ForwardBatch,
    kv: KvGroup,
    cut: _Cut,
    window: int | None,
    dtype: torch.dtype,
    mask_later: bool,
    in_place: int,
    key_block: int,
) -> Tile:
    """`in_place`: keys of a row alone up to which it is read in place."""
    page_table, device = kv.page_table, kv.page_table.device
    total, prefix, new = _device_lengths(batch)
    if len(cut.rows) < total.shape[0]:
        index = to_device(torch.tensor([row.index for row in cut.rows]), device)
        total, prefix, new, page_table = (x[index] for x in (total, prefix, new, page_table))
    seen = torch.zeros_like(prefix) if window is None else (prefix - window + 1).clamp(min=0)
    first = seen // key_block * key_block + cut.low
    step = torch.arange(cut.start, cut.stop, device=device, dtype=torch.int32)
    position = prefix[:, None] + step  # [b, E]
    dead = (step >= new[:, None]) | (position < 0)
    keys = cut.high - cut.low
    mask = None if mask_later else _mask(position, first, keys, window, dtype)
    tokens, real = _tokens(cut, device)
    slots = _slots(page_table, kv.page_size, first, seen, total, keys)
    alone = len(cut.rows) == 1 and keys <= in_place
    return Tile(
        rows=len(cut.rows),
        queries=cut.stop - cut.start,
        keys=keys,
        tokens=tokens,
        real=real,
        slots=_as_slice(slots) if alone else slots,
        position=position,
        first=first,
        window=window,
        dead=None if _known_false(dead) else dead,
        mask=None if mask is None or _known_false(mask != 0) else mask,
        mask_later=mask_later,
    )


def _device_lengths(batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Total, prefix and new tokens of each row, [B] int32."""
    if batch.prefix_lens is None or batch.extend_lens is None:
        return batch.seq_lens, batch.seq_lens - 1, torch.ones_like(batch.seq_lens)
    return batch.seq_lens, batch.prefix_lens, batch.extend_lens


def _slots(
    page_table: Tensor, page_size: int, first: Tensor, seen: Tensor, total: Tensor, keys: int
) -> Tensor:
    """Slots of the key columns, [b * C] int64; columns past a row's end repeat its last token, and
    those before the first one that a query sees repeat that."""
    last = (total - 1).clamp(min=0)
    column = torch.arange(keys, device=page_table.device, dtype=torch.int32)
    position = torch.maximum(first[:, None] + column, seen[:, None])
    position = torch.minimum(position, last[:, None]).long()  # [b, C]
    page = page_table.gather(1, position // page_size).long()
    return (page * page_size + position % page_size).flatten()


def _as_slice(slots: Tensor) -> Tensor | slice:
    """The slots as a slice, where they follow each other and asking waits for no device."""
    if slots.device.type != "cpu":
        return slots
    first = int(slots[0])
    follow = torch.equal(slots, torch.arange(first, first + slots.shape[0]))
    return slice(first, first + slots.shape[0]) if follow else slots


def _tokens(cut: _Cut, device: torch.device) -> tuple[Tensor | slice, Tensor | None]:
    """Places of the queries among the tokens, and which of them are not padding."""
    tokens: list[int] = []
    real: list[int] = []
    for row in cut.rows:
        live = range(row.start + cut.start, row.start + min(cut.stop, row.new))
        real.extend(range(len(tokens), len(tokens) + len(live)))
        tokens.extend(live)
        tokens.extend([row.start + row.new - 1] * (cut.stop - cut.start - len(live)))
    if len(real) < len(tokens):
        return to_device(torch.tensor(tokens), device), to_device(torch.tensor(real), device)
    if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
        return slice(tokens[0], tokens[0] + len(tokens)), None
    return to_device(torch.tensor(tokens), device), None


def _mask(
    position: Tensor, first: Tensor, keys: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    key = first[:, None] + torch.arange(keys, device=first.device, dtype=torch.int32)  # [b, C]
    hidden = key[:, None] > position[:, :, None]  # [b, E, C]
    if window is not None:
        hidden |= key[:, None] <= position[:, :, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=first.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None]


def _known_false(condition: Tensor) -> bool:
    """Whether nothing is true, where asking costs no wait for the device."""
    return condition.device.type == "cpu" and not condition.any()
