"""The one ending of each sequence, and what comes free with it."""

from collections import Counter
from collections.abc import Iterable

from headrace.base.log import get_logger
from headrace.request.outcome import Finished, FinishReason
from headrace.scheduler.chooser import Chooser, Share
from headrace.scheduler.sequence import Sequence, State

log = get_logger(__name__)


class Endings:
    """Knows the sequences that have not ended, and ends them, each exactly once.

    Args:
        chooser: takes row and pages back. counts: gets "finished_" and the reason, "failed_steps".
    """

    def __init__(self, chooser: Chooser, counts: Counter[str]) -> None:
        self._chooser, self._counts = chooser, counts
        self._groups: dict[str, list[Sequence]] = {}  # what is left of each request
        self._ended: list[str] = []

    def expect(self, request_id: str, group: Iterable[Sequence]) -> None:
        """A request was queued: each of its sequences will end."""
        self._groups[request_id] = list(group)

    def left_of(self, request_id: str) -> tuple[Sequence, ...]:
        """Sequences of a request that have not ended."""
        return tuple(self._groups.get(request_id, ()))

    @property
    def are_due(self) -> bool:
        """Some sequence has not ended."""
        return bool(self._groups)

    def take_ended(self) -> list[str]:
        """Ids of the requests whose last sequence ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self, sequence: Sequence, ending: Finished) -> None:
        """End a sequence, unless it has ended already."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self._chooser.waiting.remove(sequence)
        sequence.state = State.FINISHED
        sequence.ending = ending
        self._counts[f"finished_{ending.reason}"] += 1
        group = self._groups[sequence.request.request_id]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request.request_id]
            self._ended.append(sequence.request.request_id)
        self.settle(sequence)
        if sequence.state_rows is not None:
            sequence.sink.hidden_states(sequence.state_rows.packed())
        if sequence.routing_rows is not None:
            sequence.sink.routed_experts(sequence.routing_rows.experts())
        sequence.sink.finished(ending)

    def settle(self, sequence: Sequence) -> None:
        """Free what a sequence that leaves holds, once no step in flight names it."""
        self._chooser.settle(sequence)
        if sequence.request.request_id not in self._groups:
            self._chooser.keeper.forget_request(sequence)

    def fail(self, shares: list[Share], error: BaseException) -> None:
        """Whatever a step raises ends its sequences, not the engine; an interrupt goes on."""
        is_failure = isinstance(error, Exception)
        reason: FinishReason = "error" if is_failure else "abort"
        for share in shares:
            self.finish(share.sequence, Finished(reason, message=_describe(error)))
        if not is_failure:
            raise error
        log.error("A step of %d sequences failed", len(shares), exc_info=error)
        self._counts["failed_steps"] += 1


def _describe(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text[:500]}"
