"""Ctrl-C waits for the end of a step, so that it never finds memory half given out."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class HeldInterrupts:
    """Whether Ctrl-C was pressed within the block."""

    def __init__(self) -> None:
        self._pressed = False

    def raise_pressed(self) -> None:
        """Raise `KeyboardInterrupt` if it was; between two steps is a good place."""
        if self._pressed:
            self._pressed = False
            raise KeyboardInterrupt

    def _press(self, *_: object) -> None:
        if self._pressed:  # the second one does not wait
            raise KeyboardInterrupt
        self._pressed = True


@contextmanager
def interrupts_held() -> Iterator[HeldInterrupts]:
    """Raise the `KeyboardInterrupt` of a Ctrl-C at the end of the block, or where the block asks.

    Blocks may be nested: the outermost holds. Does nothing where Python's own handler is not the
    one in charge: in threads other than the main one, and where the program handles the signal
    itself.
    """
    held = HeldInterrupts()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield held
        return
    signal.signal(signal.SIGINT, held._press)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        held.raise_pressed()
