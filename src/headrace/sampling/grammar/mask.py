"""The mask of one sequence whose answer has a grammar, and how long its steps may take."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.base.log import get_logger
from headrace.sampling.grammar.protocols import GrammarMatcher, PendingGrammar
from headrace.sampling.host_mask import set_bits

log = get_logger(__name__)

# A sequence whose masks take more of the loop's computing time would hold up everybody: it ends.
MASK_SECONDS = 1.0  # one of them
ALL_MASKS_SECONDS = 10.0  # those of an answer together


class GrammarMask:
    """A `HostMask`: what the grammar of a sequence allows.

    It follows the output by itself, so a retracted sequence goes on where it was. The sequence's
    stop ids are allowed where the answer is complete and nowhere else, whatever text they stand
    for. Before `min_tokens` tokens the answer may not end while the grammar lets it go on; where it
    does not, the grammar wins and the answer ends early.
    """

    needs_last_token = True

    def __init__(
        self, grammar: PendingGrammar, stop_ids: frozenset[int], min_tokens: int = 0
    ) -> None:
        self._grammar, self._stop_ids, self._min_tokens = grammar, sorted(stop_ids), min_tokens
        self._matcher: GrammarMatcher | None = None
        self._seconds = 0.0
        self._taken = 0  # tokens of the output that the matcher has seen
        self.failure = ""

    def is_ready(self, wait: float = 0.0) -> bool:
        if self._matcher is None:
            compiled = self._grammar.poll(wait)
            if compiled is None:
                return False
            self._matcher = compiled.matcher()
        return True

    def narrow(self, output_ids: Sequence[int], allowed: Tensor) -> None:
        started = time.thread_time()
        try:
            self._follow(output_ids)
            if not self.failure:
                allowed &= self._line(allowed, len(output_ids))
        except Exception as error:
            log.error("A grammar failed", exc_info=error)
            self.failure = f"The grammar failed: {type(error).__name__}: {str(error)[:300]}"
        seconds = time.thread_time() - started
        self._seconds += seconds
        if seconds > MASK_SECONDS or self._seconds > ALL_MASKS_SECONDS:
            self.failure = (
                f"The grammar is too ambiguous: a step of it took {seconds:.1f} s, all steps "
                f"{self._seconds:.1f} s, where {MASK_SECONDS:g} s and {ALL_MASKS_SECONDS:g} s are "
                "allowed. Make it simpler: fewer counted repetitions."
            )
        if self.failure:
            allowed.zero_()

    def _follow(self, output_ids: Sequence[int]) -> None:
        assert self._matcher is not None, "a sequence runs once its mask is ready"
        for token in output_ids[self._taken :]:
            if not self._matcher.accept(token):
                self.failure = f"Token {token} of the answer is not what its grammar allows."
                return
            self._taken += 1

    def _line(self, like: Tensor, made: int) -> Tensor:
        """[W] int32: text that may follow, and the stop ids where the answer may end."""
        assert self._matcher is not None, "a sequence runs once its mask is ready"
        line = torch.empty_like(like)
        self._matcher.allowed(line)
        set_bits(line, self._stop_ids, allowed=False)
        goes_on = bool(line.any())
        if self._matcher.is_complete and (made >= self._min_tokens or not goes_on):
            set_bits(line, self._stop_ids, allowed=True)
        elif not goes_on:
            self.failure = "No token of this vocabulary can continue what the grammar began."
        return line
