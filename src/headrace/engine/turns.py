"""Whose turn it is, where several threads share an engine."""

import threading


class Turns:
    """A lock that goes to whoever waits for it before its last holder can have it again.

    Python's own lock is usually taken again at once by the thread that leaves it, so that a thread
    in a loop of steps would keep the others from ever adding a request. Here one waits at a gate
    to be next, and the gate stays shut until the next one is in.
    """

    def __init__(self) -> None:
        self._gate, self._work = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._gate:
            self._work.acquire()

    def __exit__(self, *_: object) -> None:
        self._work.release()

    def take_if_free(self) -> bool:
        """Take the turn without waiting; give it back with `give_back`."""
        return self._work.acquire(blocking=False)

    def give_back(self) -> None:
        self._work.release()
