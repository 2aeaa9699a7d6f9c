"""Run plain Python code in a thread of its own, for so many seconds and no longer.

For chat templates: Jinja in a sandbox can still loop for hours over what a message holds. A thread
cannot be killed, but Python lets another thread raise an exception in it between two of its
instructions, and a template is nothing but Python instructions.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class _Overdue(BaseException):
    """Raised in the thread. Not an Exception: template code guards itself against those."""


async def within_seconds(seconds: float, work: Callable[[], Result]) -> Result:
    """The result of `work`, run beside the event loop.

    Raises:
        TimeoutError: it took longer; the thread is told to end.
        Exception: what `work` raised.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            try:
                result, error = work(), None
            except Exception as raised:
                result, error = None, raised
            loop.call_soon_threadsafe(settle, result, error)
        except _Overdue:
            return  # nobody waits any more
        except RuntimeError:
            return  # the loop is closed: the server has stopped

    thread = threading.Thread(target=run, name="headrace-within-seconds", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(outcome, seconds)
    except (TimeoutError, asyncio.CancelledError):
        _raise_in(thread)
        raise


def _raise_in(thread: threading.Thread) -> None:
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_Overdue)
        )
