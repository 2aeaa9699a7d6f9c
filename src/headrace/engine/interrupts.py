"""Ctrl-C waits for the end of a turn, so that it never finds memory half given out."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Raise the `KeyboardInterrupt` of a Ctrl-C at the end of the block; a second one at once.

    Does nothing where Python's own handler is not the one in charge: in threads other than the
    main one, and where the program handles the signal itself.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    pressed = False

    def hold(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt
