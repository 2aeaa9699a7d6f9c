"""Taps: device work around the model's body, on every path, inside its graph where it has one."""

from collections.abc import Sequence
from typing import Protocol

from headrace.batch.forward_batch import ForwardBatch


class ForwardTap(Protocol):
    """Launches device work before and after the body of a forward.

    A path that records the whole step records its taps with it: they use device operations only,
    allocate nothing that outlives the step, and read exact lengths on the device, never bounds of
    the host. Padding is row 0 and slot 0: nothing is said about it.
    """

    name: str

    def before(self, batch: ForwardBatch) -> None:
        """The batch is filled and attention is planned; nothing is written yet."""

    def after(self, batch: ForwardBatch) -> None:
        """Keys and values of the step are written; nothing is sampled, no row is advanced yet."""


class Taps:
    """All taps of a runner, in order; without one, nothing is launched."""

    def __init__(self, taps: Sequence[ForwardTap] = ()) -> None:
        self._taps = tuple(taps)

    def before(self, batch: ForwardBatch) -> None:
        for tap in self._taps:
            tap.before(batch)

    def after(self, batch: ForwardBatch) -> None:
        for tap in reversed(self._taps):
            tap.after(batch)


NO_TAPS = Taps()
