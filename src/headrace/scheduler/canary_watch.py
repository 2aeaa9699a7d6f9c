"""What the KV canary's findings mean for sequences and pages, and the canary's check of the input.

The device compares slots with each other; the host knows which tokens a sequence has. So it also
compares what was fed with what it knows, and the chain behind each sequence with its own: a page
table that leads to a history that is whole, but another sequence's, shows here alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.base.log import get_logger
from headrace.kernels.kv_canary import (
    BEFORE,
    CHAIN,
    DATA,
    POSITION,
    SWEPT,
    TOKEN,
    chain_of,
    mark_hashes,
)
from headrace.observers.kv_canary import CanaryFindings, KvCanary, Violation
from headrace.runner.model_runner import ModelRunner
from headrace.scheduler.chooser import Share
from headrace.scheduler.page_keeper import PageKeeper
from headrace.scheduler.sequence import Sequence, State

log = get_logger(__name__)

KIND_NAMES = {POSITION: "position", CHAIN: "chain", TOKEN: "token", DATA: "real KV"}
LOGGED_PLACES = 1024  # more are counted only
_WORD = (1 << 64) - 1

Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with one sequence, where it begins.

    Attributes:
        page: the first that is concerned. pages: all that no one should read.
    """

    sequence: Sequence
    page: int
    pages: frozenset[int]
    kinds: int
    message: str


class CanaryWatch:
    """Reads the findings of each step.

    Args:
        canary: what finds them. keeper: whose pages they concern.
        counts: gets "kv_canary_violations", "kv_canary_sequences" and "kv_canary_swept_pages".
        raises: sequences that are concerned end with an error; else it is logged alone.
        sweep_interval: steps between two sweeps of the prefix cache; 0: none.
    """

    def __init__(
        self,
        canary: KvCanary,
        keeper: PageKeeper,
        counts: Counter[str],
        *,
        raises: bool,
        sweep_interval: int,
    ) -> None:
        self._canary, self._keeper, self._counts = canary, keeper, counts
        self._raises, self._interval = raises, sweep_interval
        self._steps = 0
        self._logged: set[tuple[int, int]] = set()
        for name in ("violations", "sequences", "swept_pages"):
            counts[f"kv_canary_{name}"] += 0

    def before_launch(self) -> None:
        """Pages are settled for the step that is launched next: have it sweep if it is time."""
        self._steps += 1
        if self._interval and self._steps % self._interval == 0:
            runs = list(self._keeper.cache.held_runs())
            self._counts["kv_canary_swept_pages"] += len(runs)
            self._canary.sweep_next(runs)

    def judge(self, shares: list[Share]) -> list[tuple[Sequence, str]]:
        """The sequences that end for what the step has found, each with a message.

        `shares` are those of the step whose results are being taken, before they are: `computed` of
        each sequence is still its length before the step.
        """
        told = self._canary.latest
        findings = {finding.sequence: finding for finding in self._of_input(shares, told)}
        for finding in self._of_slots(shares, told.violations):
            findings.setdefault(finding.sequence, finding)
        swept = [each for each in told.violations if each.stage == SWEPT]
        self._counts["kv_canary_violations"] += len(told.violations) + told.lost
        if not findings and not swept:
            return []
        self._counts["kv_canary_sequences"] += len(findings)
        for finding in findings.values():
            self._keeper.distrust(finding.pages)
            self._log(finding.page, finding.kinds, finding.message)
        self._keeper.distrust({self._page(each) for each in told.violations})
        for each in swept:
            self._log(
                self._page(each),
                each.kinds,
                f"KV canary: {self._where(each)} of the prefix cache: {_names(each.kinds)}; "
                f"{_what(each)}; it is dropped",
            )
        if not self._raises:
            return []
        return [(finding.sequence, finding.message) for finding in findings.values()]

    # ---- what slots say

    def _of_slots(self, shares: list[Share], violations: Iterable[Violation]) -> Iterator[Finding]:
        """The first position of each sequence whose slot is wrong; `violations` are sorted."""
        in_steps = (each for each in violations if each.stage != SWEPT)
        for place, found in groupby(in_steps, lambda each: each.place):
            lines, sequence = list(found), shares[place].sequence
            if sequence.state is State.FINISHED:
                continue  # told of already, or nobody waits for it
            first = lines[0]
            kinds = 0
            for line in lines:
                kinds |= line.kinds if line.position == first.position else 0
            when = "before" if first.stage == BEFORE else "after"
            pages = {self._page(line) for line in lines}
            yield Finding(
                sequence=sequence,
                page=self._page(first),
                pages=frozenset(pages | set(self._pages_from(sequence, first.position))),
                kinds=kinds,
                message=f"KV canary: sequence {sequence.name}, {self._where(first)}: "
                f"{_names(kinds)}; {_what(first)}; found {when} the model ran, "
                f"{len(lines)} in all",
            )

    def _where(self, violation: Violation) -> str:
        slot = violation.slot
        text = f"position {violation.position}, slot {slot} of page {self._page(violation)}"
        is_one = len(self._canary.groups) == 1
        return text if is_one else f"{text}, group {violation.group}"

    def _page(self, violation: Violation) -> int:
        return violation.slot // self._keeper.page_size

    def _pages_from(self, sequence: Sequence, position: int) -> list[int]:
        """Pages of a sequence from the one that holds a position on."""
        return sequence.pages[position // self._keeper.page_size :]

    # ---- what the host knows

    def _of_input(self, shares: list[Share], told: CanaryFindings) -> Iterator[Finding]:
        """Sequences that were fed another token, or read another history, than they have."""
        stops = accumulate(share.new_tokens for share in shares)
        known = [
            (place, share, stop)
            for place, (share, stop) in enumerate(zip(shares, stops, strict=True))
            if share.sequence.state is not State.FINISHED  # else it may have gone on meanwhile
        ]
        if not known:
            return
        tokens: list[int] = []
        positions: list[int] = []
        for _, share, _ in known:
            start, stop = share.sequence.computed, share.sequence.computed + share.new_tokens
            tokens += share.sequence.tokens[start:stop]
            positions += range(start, stop)
        right = np.array((tokens, positions), dtype=np.int64)  # [2, n]
        inputs, ends = told.inputs.numpy(), told.ends.numpy()
        fed = np.concatenate([inputs[:, stop - s.new_tokens : stop] for _, s, stop in known], 1)
        begins = [0, *accumulate(share.new_tokens for _, share, _ in known)]
        expected = self._chains([share for _, share, _ in known], right, begins[:-1])
        read = ends[:, [place for place, _, _ in known]]  # [groups, sequences]
        wrong_input = np.logical_or.reduceat((fed != right).any(0), begins[:-1])
        wrong_end = (read != expected).any(0)
        for index in (wrong_input | wrong_end).nonzero()[0].tolist():
            share, begin = known[index][1], begins[index]
            if wrong_input[index]:
                at = begin + int((fed != right)[:, begin:].any(0).argmax())
                yield self._wrong_input(share.sequence, right[:, at], fed[:, at])
            else:
                yield self._wrong_end(share, int(expected[index]), read[:, index].tolist())

    def _chains(self, shares: list[Share], right: Integers, begins: list[int]) -> Integers:
        """[sequences] int64: the chain behind each, as the host has its tokens.

        right: [2, n], tokens and positions of the step; begins: where each sequence's begin.
        """
        before = []
        for share in shares:
            sequence, start = share.sequence, share.sequence.computed
            length, chain = sequence.canary_chain
            before.append(chain if length == start else chain_of(sequence.tokens[:start]))
        hashes = mark_hashes(*right)
        sums = np.add.reduceat(hashes, begins)
        chains = (np.array(before, dtype=np.int64).view(np.uint64) + sums).view(np.int64)
        for share, chain in zip(shares, chains.tolist(), strict=True):
            share.sequence.canary_chain = (share.sequence.computed + share.new_tokens, chain)
        return chains

    def _wrong_input(self, sequence: Sequence, right: Integers, fed: Integers) -> Finding:
        token, position = right.tolist()
        fed_token, fed_position = fed.tolist()
        kinds = TOKEN * (fed_token != token) | POSITION * (fed_position != position)
        what = f"fed token {fed_token} at position {fed_position}"
        self._counts["kv_canary_violations"] += 1
        pages = self._pages_from(sequence, position)
        return Finding(
            sequence=sequence,
            page=pages[0],
            pages=frozenset(pages),
            kinds=kinds,
            message=f"KV canary: sequence {sequence.name}, position {position}: {_names(kinds)}; "
            f"{what}, the sequence has token {token} at position {position}",
        )

    def _wrong_end(self, share: Share, right: int, ends: list[int]) -> Finding:
        """ends: [groups], the chain behind the sequence as each page table leads to it."""
        sequence, start = share.sequence, share.sequence.computed
        found = next(end for end in ends if end != right)
        # One that goes on with another history is told of once.
        sequence.canary_chain = (start + share.new_tokens, found)
        last = start + share.new_tokens - 1
        what = "the row is not active"
        if found:
            what = f"expected {right & _WORD:016x}, found {found & _WORD:016x}"
        self._counts["kv_canary_violations"] += 1
        return Finding(
            sequence=sequence,
            page=sequence.pages[0],
            pages=frozenset(sequence.pages),
            kinds=CHAIN,
            message=f"KV canary: sequence {sequence.name}, position {last}: chain; the history "
            f"that was read is not that of its tokens, {what}",
        )

    def _log(self, page: int, kinds: int, message: str) -> None:
        """Once for each place."""
        if (page, kinds) not in self._logged and len(self._logged) < LOGGED_PLACES:
            self._logged.add((page, kinds))
            log.error("%s", message)


def canary_watch(
    runner: ModelRunner, keeper: PageKeeper, counts: Counter[str]
) -> CanaryWatch | None:
    """The watch of a runner's canary; `None` where it has none."""
    if runner.kv_canary is None:
        return None
    return CanaryWatch(
        runner.kv_canary,
        keeper,
        counts,
        raises=runner.plan.kv_canary.value == "raise",
        sweep_interval=runner.plan.kv_canary_sweep_interval.value,
    )


def _names(kinds: int) -> str:
    return ", ".join(name for kind, name in KIND_NAMES.items() if kinds & kind)


def _what(violation: Violation) -> str:
    expected, found = violation.expected, violation.found
    if violation.kinds & POSITION:
        return f"the slot holds position {found}"
    if violation.kinds & (CHAIN | DATA):
        return f"expected {expected & _WORD:016x}, found {found & _WORD:016x}"
    return f"expected token {expected}, the slot holds {found}"
