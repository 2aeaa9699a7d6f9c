"""Run plain Python code in a thread of its own, for so many seconds and no longer.

For chat templates: Jinja in a sandbox can still loop for hours over what a message holds. A thread
cannot be killed, but Python lets another thread raise an exception in it between two of its
instructions, and a template is nothing but Python instructions.
"""

import _thread
import asyncio
import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

Result = TypeVar("Result")


class _Overdue(BaseException):
    """Raised in the thread. Not an Exception: template code guards itself against those."""


async def within_seconds(seconds: float, work: Callable[[], Result]) -> Result:
    """The result of `work`, run beside the event loop.

    Raises:
        TimeoutError: it took longer; the thread is told to end.
        Exception: what `work` raised.
    """
    thread = _WorkThread(work)
    try:
        return await asyncio.wait_for(thread.outcome, seconds)
    finally:
        thread.end()


class _WorkThread(Generic[Result]):
    """A bare thread: `threading.Thread` would make the event loop wait until it has started."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Result] = self._loop.create_future()
        self._work, self._lock, self._is_over = work, threading.Lock(), False
        self._ident = _thread.start_new_thread(self._run, ())

    def end(self) -> None:
        """Interrupt it, unless it is over; then its number may belong to another thread."""
        with self._lock:
            if not self._is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._ident), ctypes.py_object(_Overdue)
                )

    def _run(self) -> None:
        try:
            try:
                settle = partial(self.outcome.set_result, self._work())
            except Exception as error:
                settle = partial(self.outcome.set_exception, error)
            with self._lock:
                self._is_over = True
            self._loop.call_soon_threadsafe(self._settle, settle)
        except _Overdue:
            return  # nobody waits any more
        except RuntimeError:
            return  # the loop is closed: the server has stopped

    def _settle(self, settle: Callable[[], None]) -> None:
        if not self.outcome.done():
            settle()
