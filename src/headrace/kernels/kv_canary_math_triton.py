"""What programs of the KV canary compute: hashes, where page tables lead, what records tell."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from headrace.kernels import kv_canary, noise

CHAIN = tl.constexpr(kv_canary.CHAIN)
POSITION = tl.constexpr(kv_canary.POSITION)
FIELDS = tl.constexpr(len(kv_canary.FIELDS))
GOLDEN = tl.constexpr(noise.GOLDEN)
MIX64 = tl.constexpr(noise.MIX64)
MIX64_LAST = tl.constexpr(noise.MIX64_LAST)


@triton.jit
def mix64(word):
    """int64 -> int64."""
    word = word.to(tl.uint64, bitcast=True) + GOLDEN
    word = (word ^ (word >> MIX64[0][0])) * MIX64[0][1]
    word = (word ^ (word >> MIX64[1][0])) * MIX64[1][1]
    return (word ^ (word >> MIX64_LAST)).to(tl.int64, bitcast=True)


@triton.jit
def slots_of(table, position, skipped, there, PAGE: tl.constexpr):
    """Where the row of the page table at `table` leads; int64, 0 where not `there`."""
    page = tl.load(table + position // PAGE - skipped, mask=there, other=0).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.jit
def records_found(
    table, position, skipped, there, marks, chains, HISTORY: tl.constexpr, PAGE: tl.constexpr
):
    """Kinds of violations of records, what was expected and found, slots and marks."""
    slot = slots_of(table, position, skipped, there, PAGE)
    inner = there & (position > 0)
    before = slots_of(table, position - 1, skipped, inner, PAGE)
    mark = tl.load(marks + slot, mask=there, other=0)
    chain = tl.load(chains + slot, mask=there, other=0)
    right = tl.load(chains + before, mask=inner, other=HISTORY) + mix64(mark)
    at = mark >> 32
    wrong_place, wrong_chain = there & (at != position), there & (chain != right)
    kinds = wrong_place.to(tl.int32) * POSITION + wrong_chain.to(tl.int32) * CHAIN
    expected = tl.where(wrong_place, position.to(tl.int64), right)
    return kinds, expected, tl.where(wrong_place, at, chain), slot, mark


@triton.jit
def append(
    ring,
    count,
    kinds,
    stage,
    place,
    position,
    slot,
    expected,
    found,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One line of the ring for every lane that has a kind."""
    bad = kinds != 0
    if tl.max(bad.to(tl.int32), 0) > 0:
        nothing = tl.zeros([BLOCK], tl.int32)
        index = tl.atomic_add(count + nothing, nothing + 1, mask=bad)
        line, room = ring + index * FIELDS, bad & (index < CAPACITY)
        tl.store(line, kinds.to(tl.int64), mask=room)
        tl.store(line + 1, (nothing + stage).to(tl.int64), mask=room)
        tl.store(line + 2, (nothing + GROUP).to(tl.int64), mask=room)
        tl.store(line + 3, (nothing + place).to(tl.int64), mask=room)
        tl.store(line + 4, position.to(tl.int64), mask=room)
        tl.store(line + 5, slot, mask=room)
        tl.store(line + 6, expected, mask=room)
        tl.store(line + 7, found, mask=room)


@triton.jit
def add_words(
    sums,
    words,
    slot,
    there,
    layers,
    slots,
    SALT: tl.constexpr,
    LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    READ: tl.constexpr,
    LAYER_TILE: tl.constexpr,
    WORD_TILE: tl.constexpr,
):
    """`sums` [BLOCK, LAYER_TILE, WORD_TILE] and the words of the slots times their factors."""
    begin = slot[:, None, None] * WORDS
    for first_layer in range(0, LAYERS, LAYER_TILE):
        member = first_layer + tl.arange(0, LAYER_TILE)
        layer = tl.load(layers + member, mask=member < LAYERS, other=0).to(tl.int64)
        plane = (layer * slots * WORDS)[None, :, None]
        exists = there[:, None, None] & (member < LAYERS)[None, :, None]
        for first_word in range(0, READ, WORD_TILE):
            word = (first_word + tl.arange(0, WORD_TILE))[None, None, :]
            found = tl.load(words + plane + begin + word, mask=exists & (word < READ), other=0)
            name = (member.to(tl.int64) << 32)[None, :, None] | (word.to(tl.int64) << 1) | SALT
            factor = mix64(name) | 1
            sums += found.to(tl.int64) * factor
    return sums
