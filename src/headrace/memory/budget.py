"""How many tokens of KV fit: bytes = tokens x bytes per token + fixed bytes. Plain integers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.base.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One line of the memory table."""

    name: str
    bytes: int
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name:<24} {self.bytes / 2**20:>12,.1f} MiB  {self.note}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """The KV pool that fits.

    `pages` counts the padding page: it is the `num_pages` of pools and allocator. `tokens` is what
    sequences can use, so `(pages - 1) * page_size`. `bytes` is that of all pages, what lies beside
    them included. `reason` says what set the size, with its numbers. `lines` is the table; `str`
    prints it.
    """

    tokens: int
    pages: int
    bytes: int
    reason: str
    lines: tuple[BudgetLine, ...]

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)


def plan_kv_tokens(
    free_bytes: int,
    fixed: Mapping[str, int],
    per_token: int,
    page_size: int,
    cap_tokens: int | None = None,
    *,
    asked: bool = False,
    canary_per_token: int = 0,
) -> KvBudget:
    """The largest KV pool that leaves room for everything fixed.

    Args:
        free_bytes: what may be spent, by `gpu_spendable_bytes` or `cpu_spendable_bytes`.
        fixed: bytes by name of what is allocated besides KV: graphs, page tables, activations.
        per_token: bytes of KV of one token, all pools together.
        page_size: tokens a page.
        cap_tokens: no more tokens than this, rounded up to whole pages; `None`: no limit.
        asked: `cap_tokens` was asked for, so fewer will not do.
        canary_per_token: bytes of the KV canary's records beside each token.

    Raises:
        CapacityError: not even one page besides the padding page fits, or fewer tokens than asked;
            with all numbers.
    """
    kv_per_token, per_token = per_token, per_token + canary_per_token
    page_bytes = per_token * page_size
    spare = free_bytes - sum(fixed.values())
    fitting = spare // page_bytes - 1  # the padding page takes one
    if fitting < 1:
        raise _no_room(free_bytes, fixed, per_token, page_size)
    wanted = fitting if cap_tokens is None else max(1, -(-cap_tokens // page_size))
    if asked and wanted > fitting:
        raise CapacityError(
            f"max_total_tokens {cap_tokens:,} was asked and {fitting * page_size:,} tokens fit",
            why=f"{free_bytes:,} bytes may be spent, {free_bytes - spare:,} are fixed, and a token "
            f"takes {per_token:,}, in pages of {page_size} with one page for padding",
            remedy=f"Ask for at most {fitting * page_size:,}, leave it out to get what fits, raise "
            "mem_fraction, or free memory",
        )
    usable = min(fitting, wanted)
    reason = f"{spare / 2**20:,.1f} MiB at {per_token:,} bytes a token"
    if wanted < fitting:
        reason = f"capped at {cap_tokens:,} tokens; {fitting * page_size:,} would fit"
    return KvBudget(
        tokens=usable * page_size,
        pages=usable + 1,
        bytes=(usable + 1) * page_bytes,
        reason=reason,
        lines=tuple(_lines(free_bytes, fixed, usable, page_size, kv_per_token, canary_per_token)),
    )


def _no_room(
    free_bytes: int, fixed: Mapping[str, int], per_token: int, page_size: int
) -> CapacityError:
    parts = ", ".join(f"{name} {count:,}" for name, count in fixed.items())
    return CapacityError(
        f"No room for KV: {free_bytes:,} bytes may be spent, {sum(fixed.values()):,} are fixed"
        f"{f' ({parts})' if parts else ''}, and two pages of {page_size} tokens take "
        f"{2 * per_token * page_size:,} ({per_token:,} a token)",
        why="one page is for padding and at least one must hold tokens",
        remedy="Raise mem_fraction, lower page_size, chunked_prefill_size or "
        "max_running_requests, take a smaller kv_cache_dtype or model, or free memory",
    )


def _lines(
    free_bytes: int,
    fixed: Mapping[str, int],
    usable_pages: int,
    page_size: int,
    per_token: int,
    canary_per_token: int,
) -> Iterator[BudgetLine]:
    pool_tokens = (usable_pages + 1) * page_size
    pool_bytes, canary_bytes = pool_tokens * per_token, pool_tokens * canary_per_token
    yield spendable_line(free_bytes)
    for name, count in fixed.items():
        yield BudgetLine(name=name, bytes=count)
    yield BudgetLine(
        name="kv",
        bytes=pool_bytes,
        note=f"{usable_pages * page_size:,} tokens x {per_token:,} bytes, "
        f"{usable_pages:,} + 1 pages of {page_size}",
    )
    if canary_bytes:
        note = f"{canary_per_token:,} bytes beside each of them"
        yield BudgetLine(name="kv canary", bytes=canary_bytes, note=note)
    yield BudgetLine(
        name="left",
        bytes=free_bytes - sum(fixed.values()) - pool_bytes - canary_bytes,
        note="no further page fits, or none is wanted",
    )


def spendable_line(count: int) -> BudgetLine:
    """What the lines below it share."""
    return BudgetLine(
        name="may be spent",
        bytes=count,
        note="on the lines below; set by mem_fraction, after the weights",
    )


def gpu_spendable_bytes(*, free_after_load: int, total: int, mem_fraction: float) -> int:
    """What a GPU may spend on KV and everything fixed, once the weights are loaded.

    `mem_fraction` is the share of the whole device that the engine may use, so the rest is left
    free whatever else lies on the device. May be negative when others use too much.
    """
    return free_after_load - round(total * (1 - mem_fraction))


def cpu_spendable_bytes(*, available: int, mem_fraction: float) -> int:
    """What a CPU may spend: a share of the memory available now, since others live there too."""
    return int(available * mem_fraction)
