"""Spans: named ranges over the parts of a step, for whoever profiles.

Opening a range costs torch's profiler some 6 us on the host, used or not, and a step has six of
them; so they are opened only while a profile runs. Otherwise a span costs a call, some 0.2 us.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

PREFIX = "headrace."

Open = Callable[[str], AbstractContextManager[Any]]
_NOTHING = nullcontext()


class Spans:
    """Ranges of one runner. `headrace.step N` holds `prepare`, `forward ...` and `sample`; before
    it comes `schedule`, and `process N`, which begins with `wait`, when its results are due."""

    def __init__(self) -> None:
        self._open: Open | None = None

    def __call__(self, name: str, *details: object) -> AbstractContextManager[Any]:
        """A range; `details` are written out only if somebody looks."""
        if self._open is None:
            return _NOTHING
        return self._open(" ".join((PREFIX + name, *map(str, details))))

    def show(self, opened: Open | None) -> None:
        """Open ranges by this from now on; `None`: no more."""
        self._open = opened
