"""Ctrl-C waits for the end of a step, so that it never finds memory half given out; what handlers
of the program's own raise is not taken for a fault of the step that they came in."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGALRM") if hasattr(signal, name)]


class HeldInterrupts:
    """Whether Ctrl-C was pressed within the block."""

    def __init__(self) -> None:
        self._pressed = False

    def raise_pressed(self) -> None:
        """Raise `KeyboardInterrupt` if it was; between two steps is a good place."""
        if self._pressed:
            self._pressed = False
            raise KeyboardInterrupt

    def press(self, *_: object) -> None:
        if self._pressed:  # the second one does not wait
            raise KeyboardInterrupt
        self._pressed = True


class _Raised(BaseException):
    """What a handler raised, in a form that no `except Exception` on its way takes."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Handling:
    """A handler of the program, called at once."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except Exception as error:
            raise _Raised(error) from None


@contextmanager
def interrupts_held() -> Iterator[HeldInterrupts]:
    """Raise the `KeyboardInterrupt` of a Ctrl-C at the end of the block, or where the block asks.

    Where the program handles Ctrl-C or alarms itself its handler runs at once, and what it raises
    (a TimeoutError, as a rule) comes out of the block.

    Blocks may be nested: the outermost holds. Does nothing in threads other than the main one,
    where Python runs no handlers.
    """
    held = HeldInterrupts()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    put = _put_handlers(held)
    try:
        yield held
    except _Raised as raised:
        if not put:
            raise  # the outermost block's
        raise raised.error from None
    finally:
        for number, (ours, theirs) in put.items():
            if signal.getsignal(number) is ours:  # a handler may have set another
                signal.signal(number, theirs)
        held.raise_pressed()


def _put_handlers(held: HeldInterrupts) -> dict[int, tuple[Handler, Handler]]:
    """Signal -> the handler that was put in, and the one before it."""
    put: dict[int, tuple[Handler, Handler]] = {}
    for number in _NUMBERS:
        theirs = signal.getsignal(number)
        if not callable(theirs) or isinstance(theirs, _Handling):
            continue
        if theirs is signal.default_int_handler:
            ours: Handler = held.press
        elif isinstance(getattr(theirs, "__self__", None), HeldInterrupts):
            continue
        else:
            ours = _Handling(theirs)
        signal.signal(number, ours)
        put[number] = (ours, theirs)
    return put
