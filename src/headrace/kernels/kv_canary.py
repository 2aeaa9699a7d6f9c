"""Records beside the KV pool and their check, in plain torch: the meaning of the Triton kernels.

A slot has a record: its mark (position and token), its chain and its fingerprint. The chain of a
token is that of the token before it plus a hash of its own mark, so it names the whole history:
the sum of hashes of pairs that all differ is a multiset hash (Bellare, Micciancio, "A new paradigm
for collision-free hashing", 1997), and sums can be taken by many programs at once. A fingerprint is
the sum of the 32-bit words of a slot's keys and values, as signed numbers, times 64-bit odd ones,
one per place, so that no change of one word is missed (multilinear hashing; Carter, Wegman, 1979).
It is no part of the chain: equal tokens have equal chains though their keys may differ in the last
bit, as they do where a cached prefix of one sequence is continued by another.

The idea of a canary beside the pool, stamped and verified around the model, is SGLang's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.noise import GOLDEN, MIX64, MIX64_LAST

CHAIN, POSITION, TOKEN, DATA = 1, 2, 4, 8
"""Kinds of violations, as bits: the chain does not continue that of the token before; the record
is of another position; of another token; keys or values are not those the fingerprint was of."""

BEFORE, AFTER, SWEPT = 0, 1, 2
"""When it was found: before the model ran, after it, or in a sweep."""

FIELDS = ("kinds", "stage", "group", "place", "position", "slot", "expected", "found")
HEAD = 0x4845414452414345
"""The chain in front of a first token: not 0, so that memory that nobody stamped has no chain."""

PARTIAL_WORDS = 4  # 16 bytes of a slot's keys, and as many of its values, in every layer
LOW_WORD = (1 << 32) - 1
_WORD = (1 << 64) - 1
Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRecords:
    """Records of all slots of one KV group.

    Attributes:
        marks: [slots] int64, position << 32 | token.
        chains: [slots] int64.
        prints: [slots] int64, fingerprints; `None`: keys and values are not looked at.
        keys, values: [L, slots, words] int32, those of all layers of the pool as plain words.
        layers: [N] int32, the layers of the group in the pool.
        words: words at the beginning of a slot's keys, and of its values, that count; 0: all.
    """

    marks: Tensor
    chains: Tensor
    prints: Tensor | None
    keys: Tensor
    values: Tensor
    layers: Tensor
    words: int = PARTIAL_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """What is found on the device.

    Attributes:
        count: [1] int32, violations, those included for which there was no room.
        ring: [capacity, 8] int64, one line of `FIELDS` for each; in any order.
        ends: [at least B] int64, the chain of each sequence as its page table leads to it; 0 for
            a row that is not active.
        inputs: [2, at least T] int32, tokens and positions as they were fed.
    """

    count: Tensor
    ring: Tensor
    ends: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryStep:
    """The sequences of a step, or runs of pages to sweep.

    Attributes:
        seq_lens: [B] int32, lengths after the step; 0: nothing is there.
        firsts: [B] int32, the first position to look at, at the beginning of a page. The page
            table begins with the page before that, where there is one.
        extend_lens, extend_start: [B] int32, new tokens and those of sequences before; `None` in
            decode, where each has one.
        input_ids, positions, out_cache_loc: [T] int64.
        page_table: [B, pages] int32.
    """

    seq_lens: Tensor
    firsts: Tensor
    extend_lens: Tensor | None
    extend_start: Tensor | None
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    page_table: Tensor
    page_size: int


def begin_step(
    step: CanaryStep, records: CanaryRecords, report: CanaryReport, *, group: int = 0
) -> None:
    """Before the model: check the records of the history, stamp those of the new tokens.

    Tokens that are fed at another position than the next one of their sequence are reported.
    """
    history, new = _places(step)
    kinds, expected, found, slots = _records_found(step, records, *history)
    _append(report, kinds, BEFORE, group, history, slots, expected, found)
    place, position, token = new
    ids, fed = step.input_ids[token] & LOW_WORD, step.positions[token]
    slots = step.out_cache_loc[token]
    _append(report, POSITION * (fed != position), BEFORE, group, new, slots, position, fed)
    marks = position << 32 | ids
    offsets = token_offsets(step, place, token)
    before = position - offsets  # the length of the history
    start = torch.where(
        before > 0,
        records.chains[_slots(step, place, (before - 1).clamp(min=0))],
        HEAD,
    )
    hashes = mix64(marks)
    sums = hashes.cumsum(0)
    first = torch.arange(len(token), device=token.device) - offsets
    earlier = torch.where(first > 0, sums[(first - 1).clamp(min=0)], 0)
    records.marks[slots] = marks
    records.chains[slots] = start + sums - earlier


def end_step(
    step: CanaryStep,
    records: CanaryRecords,
    report: CanaryReport,
    *,
    group: int = 0,
    stage: int = AFTER,
) -> None:
    """After the model: check records, keys and values, and take the fingerprints of new tokens.

    `ends` and `inputs` of the report are written for the sequences and tokens of the step.
    A sweep is this alone, with no new tokens.
    """
    report.ends[: len(step.seq_lens)] = 0
    history, new = _places(step)
    kinds, expected, found, slots = _records_found(step, records, *history)
    if records.prints is not None:
        prints = fingerprints(records, slots)
        changed = prints != records.prints[slots]
        expected = torch.where(changed & (kinds == 0), records.prints[slots], expected)
        found = torch.where(changed & (kinds == 0), prints, found)
        kinds = kinds + DATA * changed
    _append(report, kinds, stage, group, history, slots, expected, found)
    kinds, expected, found, slots = _records_found(step, records, *new)
    token = new[2]
    ids, stamped = step.input_ids[token] & LOW_WORD, records.marks[slots] & LOW_WORD
    other = ids != stamped
    expected = torch.where(other & (kinds == 0), ids, expected)
    found = torch.where(other & (kinds == 0), stamped, found)
    _append(report, kinds + TOKEN * other, stage, group, new, slots, expected, found)
    if records.prints is not None:
        records.prints[slots] = fingerprints(records, slots)
    report.inputs[0, token] = ids.int()
    report.inputs[1, token] = step.positions[token].int()
    live = (step.seq_lens > 0).nonzero()[:, 0]
    last = step.seq_lens[live].long() - 1
    report.ends[live] = records.chains[_slots(step, live, last)]


def fingerprints(records: CanaryRecords, slots: Tensor) -> Tensor:
    """[n] int64 of slots [n]: the sum of their words times the factors of their places."""
    total = torch.zeros_like(slots)
    layers = records.layers.tolist()
    for salt, words in enumerate((records.keys, records.values)):
        factors = _factors(len(layers), _read(records, words), salt, slots.device)
        for layer, of_layer in zip(layers, factors, strict=True):
            found = words[layer, :, : len(of_layer)].index_select(0, slots)  # [n, words]
            total += (found * of_layer).sum(1)
    return total


def _factors(layers: int, words: int, salt: int, device: torch.device) -> Tensor:
    """[layers, words] odd numbers, of keys (salt 0) or values (1)."""
    layer = torch.arange(layers, device=device)[:, None]
    word = torch.arange(words, device=device)[None]
    return mix64(layer << 32 | word << 1 | salt) | 1


def _read(records: CanaryRecords, words: Tensor) -> int:
    return min(records.words, words.shape[2]) if records.words else words.shape[2]


def mix64(word: Tensor) -> Tensor:
    """A hash of int64 numbers: the finaliser of SplitMix64 behind its increment."""
    word = word + _signed(GOLDEN)
    for shift, factor in MIX64:
        word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return word ^ ((word >> MIX64_LAST) & ((1 << (64 - MIX64_LAST)) - 1))


def mark_hashes(tokens: Integers, positions: Integers) -> NDArray[np.uint64]:
    """[n] of tokens and positions [n], on the host: what `mix64` makes of their marks."""
    word = (positions.astype(np.uint64) << np.uint64(32)) | tokens.astype(np.uint64)
    word += np.uint64(GOLDEN)
    for shift, factor in MIX64:
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    return word ^ (word >> np.uint64(MIX64_LAST))


def chain_of(tokens: Sequence[int], first: int = 0, before: int = HEAD) -> int:
    """The chain behind `tokens`, which stand from position `first` on behind the chain `before`."""
    positions = np.arange(first, first + len(tokens))
    hashes = mark_hashes(np.array(tokens, dtype=np.int64), positions)
    return _signed(before + int(hashes.sum(dtype=np.uint64)))


def token_offsets(step: CanaryStep, place: Tensor, token: Tensor) -> Tensor:
    """[n] int64: how many new tokens of the same sequence stand before each."""
    if step.extend_start is None:
        return torch.zeros_like(place)
    return token - step.extend_start[place].long()


Places = tuple[Tensor, Tensor, Tensor]


def _places(step: CanaryStep) -> tuple[Places, Places]:
    """Of the history, then of the new tokens: place among the sequences, position, and index among
    the tokens of the step (of the history: -1), [n] int64 each."""
    device = step.seq_lens.device
    total = step.seq_lens.long()
    new = torch.ones_like(total) if step.extend_lens is None else step.extend_lens.long()
    new = torch.minimum(new, total)
    place, column = _grid(total - new - step.firsts.long())
    position = column + step.firsts.long()[place]
    history = (place, position, torch.full_like(place, -1))
    place, column = _grid(new)
    start = torch.arange(len(total), device=device)
    if step.extend_start is not None:
        start = step.extend_start.long()
    return history, (place, column + (total - new)[place], start[place] + column)


def _grid(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every number below its row's count."""
    most = int(counts.max()) if len(counts) else 0
    columns = torch.arange(max(most, 0), device=counts.device)
    row, column = (columns[None] < counts[:, None]).nonzero().unbind(1)
    return row, column


def _slots(step: CanaryStep, place: Tensor, position: Tensor) -> Tensor:
    """[n] int64: where the page table leads."""
    skipped = (step.firsts.long()[place] // step.page_size - 1).clamp(min=0)
    pages = step.page_table[place, position // step.page_size - skipped].long()
    return pages * step.page_size + position % step.page_size


def _records_found(
    step: CanaryStep, records: CanaryRecords, place: Tensor, position: Tensor, token: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kinds of violations, what was expected and found of the first kind, and slots; [n] each."""
    slots = _slots(step, place, position)
    mark, chain = records.marks[slots], records.chains[slots]
    before = records.chains[_slots(step, place, (position - 1).clamp(min=0))]
    right = torch.where(position > 0, before, HEAD) + mix64(mark)
    at = mark >> 32
    wrong_place, wrong_chain = at != position, chain != right
    expected = torch.where(wrong_place, position, right)
    found = torch.where(wrong_place, at, chain)
    return POSITION * wrong_place + CHAIN * wrong_chain, expected, found, slots


def _append(
    report: CanaryReport,
    kinds: Tensor,
    stage: int,
    group: int,
    places: Places,
    slots: Tensor,
    expected: Tensor,
    found: Tensor,
) -> None:
    bad = kinds.nonzero()[:, 0]
    if not len(bad):
        return
    place, position, _ = places
    filled, capacity = int(report.count), len(report.ring)
    constant = torch.ones_like(bad)
    lines = torch.stack(
        (
            kinds[bad],
            constant * stage,
            constant * group,
            place[bad],
            position[bad],
            slots[bad],
            expected[bad],
            found[bad],
        ),
        dim=1,
    )
    room = max(0, capacity - filled)
    report.ring[filled : filled + len(lines)] = lines[:room]
    report.count.add_(len(lines))


def _signed(word: int) -> int:
    """The signed number with the same low 64 bits."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word
