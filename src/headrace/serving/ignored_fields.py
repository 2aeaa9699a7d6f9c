"""Fields of requests that had no effect: the answer names them, and the log each name once."""

from contextvars import ContextVar
from urllib.parse import quote

from headrace.base.log import get_logger
from headrace.base.shown import shown

log = get_logger(__name__)

IGNORED_FIELDS = "x-ignored-fields"
MOST_TOLD = 32  # names in one answer
_MOST_LOGGED = 1000  # names that one server warns of
_LONGEST = 64

OF_REQUEST: ContextVar[list[str] | None] = ContextVar("ignored_fields", default=None)
"""Those of the request that is being answered."""


class IgnoredFields:
    """Those that one server has met."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add(self, name: str, why: str) -> None:
        """A field of the request that is being answered has no effect."""
        names = OF_REQUEST.get()
        if names is not None and len(names) < MOST_TOLD:
            names.append(name)
        if name not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(name)
            log.warning("A request brings the field %s, which has no effect: %s", shown(name), why)


def header_of(names: list[str]) -> str:
    """As the header has them; what is no plain word is percent-encoded and cut."""
    return ", ".join(quote(name[:_LONGEST], safe="", errors="replace") for name in names)
