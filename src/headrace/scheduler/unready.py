"""Sequences whose grammars are being compiled."""

from collections.abc import Iterable, Iterator

from headrace.base.errors import HeadraceError
from headrace.request.outcome import Finished
from headrace.scheduler.sequence import Sequence, State

WAIT = 0.002  # seconds


class Unready:
    """Waits for them beside the loop: the chooser passes over a sequence until its mask is ready.

    Ranks that share a collective must agree on what has come: rank 0 has to tell the others.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Those among them whose masks are not ready."""
        self._sequences += [sequence for sequence in sequences if not sequence.mask_is_ready]

    def ask(self, *, is_idle: bool) -> Iterator[tuple[Sequence, Finished]]:
        """See which grammars have come; the sequences that end because theirs is none.

        Args:
            is_idle: nothing else is to do, so wait a little for the first.
        """
        wait = WAIT if is_idle else 0.0
        for sequence in tuple(self._sequences):
            mask = sequence.host_mask
            try:
                if sequence.state is not State.FINISHED:
                    sequence.mask_is_ready = mask is None or mask.is_ready(wait)
                if sequence.mask_is_ready or sequence.state is State.FINISHED:
                    self._sequences.remove(sequence)
            except HeadraceError as error:
                self._sequences.remove(sequence)
                yield sequence, Finished("error", message=str(error))
            wait = 0.0
