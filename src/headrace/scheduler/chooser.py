"""Which sequences a step serves, and with how many tokens.

Running rows decode first, then prompts that were begun go on, then waiting sequences are admitted
as long as the step's prompt token budget, rows and pages last. When pages run out a sequence is
retracted, of the lowest priority the one that came last: it gives up row and pages and resumes
later from its tokens.
"""

import time
from dataclasses import dataclass

from headrace.scheduler.page_keeper import PageKeeper
from headrace.scheduler.sequence import Sequence, State
from headrace.scheduler.waiting import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A sequence's part in a step: how many new tokens, and whether it samples at the end."""

    sequence: Sequence
    new_tokens: int
    samples: bool
    from_row: bool  # the one new token is the row's last token, which only the device may know


class Chooser:
    """Composes steps.

    `running` holds the sequences with a row, in order of admission.

    Args:
        most_prompt_tokens, most_sequences: of one step.
    """

    def __init__(self, keeper: PageKeeper, *, most_prompt_tokens: int, most_sequences: int) -> None:
        self.keeper = keeper
        self._most_prompt_tokens, self._most_sequences = most_prompt_tokens, most_sequences
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.retractions = 0
        self._admitted: list[Sequence] = []

    def choose(self, *, prompts: bool = True) -> list[Share]:
        """The next step's shares; empty when nothing can run now.

        Args:
            prompts: False leaves out all but rows that decode.
        """
        budget = self._most_prompt_tokens if prompts else 0
        shares: list[Share] = []
        for sequence in self._decodable():
            if sequence.state is State.RUNNING and self._make_room(sequence):
                shares.append(Share(sequence=sequence, new_tokens=1, samples=True, from_row=True))
        shares = [share for share in shares if share.sequence.state is State.RUNNING]
        for sequence in list(self.running):
            budget -= self._prefill(sequence, budget, shares)
        for sequence in self.waiting:
            if budget <= 0 or len(self.running) >= self._most_sequences:
                break
            if not sequence.is_ready:
                continue
            if not self._admit(sequence):
                break  # strictly in order: a long prompt is not overtaken for ever
            budget -= self._prefill(sequence, budget, shares)
        return shares

    def take_admitted(self) -> list[Sequence]:
        """Those that took a row for the step being chosen, once: their rows need their columns."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def retract(self, sequence: Sequence) -> None:
        """Take row and pages from a running sequence, now or when its steps are processed."""
        assert sequence.state is State.RUNNING, "only running sequences are retracted"
        sequence.state = State.RETRACTING
        sequence.retractions += 1
        self.retractions += 1
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Free what a retracting or finished sequence holds once no step in flight names it."""
        if sequence.in_flight or sequence.state in (State.RUNNING, State.WAITING):
            return
        if sequence in self.running:
            self.running.remove(sequence)
        self.keeper.release(sequence)
        if sequence.state is State.RETRACTING:
            sequence.state = State.WAITING
            sequence.proven_finite = False
            self.waiting.push(sequence)

    def _decodable(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.can_decode]

    def _make_room(self, sequence: Sequence) -> bool:
        """Pages for one more token, if need be those of sequences that came later."""
        while not self.keeper.grow(sequence, sequence.length_bound + 1):
            victim = self._victim()
            if victim is None:
                return False
            self.retract(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence | None:
        """Lowest priority first, then the latest arrival; `None` while somebody else is about to
        give pages back, when its steps are processed.

        One that is alone and finds no page reads pages of its own for a prefix that the cache holds
        too (both computed it in one step). Resuming, it finds all of it in the cache.
        """
        if any(sequence.state is State.RETRACTING for sequence in self.running):
            return None
        candidates = [item for item in self.running if item.state is State.RUNNING]
        if len(candidates) < 2 <= len(self.running):
            return None
        return max(candidates, key=lambda item: (-item.request.priority, item.arrival))

    def _prefill(self, sequence: Sequence, budget: int, shares: list[Share]) -> int:
        new_tokens = min(sequence.prefill_left, budget)
        if new_tokens <= 0 or sequence.state is not State.RUNNING:
            return 0
        ends = new_tokens == sequence.prefill_left
        samples = ends and sequence.request.pooling is None
        shares.append(
            Share(sequence=sequence, new_tokens=new_tokens, samples=samples, from_row=False)
        )
        return new_tokens

    def _admit(self, sequence: Sequence) -> bool:
        sequence.take_leaders_rows()
        if not self.keeper.take_row(sequence, headroom=len(self.running)):
            return False
        self.waiting.remove(sequence)
        sequence.state = State.RUNNING
        if sequence.queue_seconds is None:
            sequence.queue_seconds = time.perf_counter() - sequence.queued
        if sequence.wants_prompt_logprobs:
            sequence.prompt_entries = [None]
        sequence.state_sum = None
        self.running.append(sequence)
        self._admitted.append(sequence)
        return True
