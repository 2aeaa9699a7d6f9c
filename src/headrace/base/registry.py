"""A name -> thing table that third parties can extend through entry points."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from headrace.base.errors import UnsupportedError
from headrace.base.log import get_logger

T = TypeVar("T")

logger = get_logger(__name__)


class Registry(Generic[T]):
    """Names with one or more entries each, in order of registration.

    A plug-in that cannot be imported is warned about and left out; whoever asks for it by its name
    is told why, everything else goes on.

    Args:
        kind: what the entries are, for messages ("attention backend").
        group: entry-point group read on the first look-up, or None.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self._group = group
        self._entries: dict[str, list[T]] = {}
        self._plugins_loaded = False
        self._broken: dict[str, str] = {}  # name of the entry point -> what went wrong

    def register(self, *names: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            for name in names:
                self._entries.setdefault(name, []).append(entry)
            return entry

        return add

    def entries(self, name: str) -> tuple[T, ...]:
        """All entries under `name`.

        Raises:
            UnsupportedError: there is none: why its plug-in is broken, or the known names.
        """
        self._load_plugins()
        if name in self._entries:
            return tuple(self._entries[name])
        known = f"Known: {', '.join(sorted(self._entries))}"
        if name in self._broken:
            raise UnsupportedError(
                f"The plug-in of {self.kind} {name!r} cannot be loaded",
                why=self._broken[name],
                remedy=f"Mend or uninstall it. {known}",
            )
        raise UnsupportedError(f"Unknown {self.kind} {name!r}", remedy=known)

    def __contains__(self, name: str) -> bool:
        self._load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(self._entries)

    def _load_plugins(self) -> None:
        if self._plugins_loaded or self._group is None:
            return
        self._plugins_loaded = True
        for point in entry_points(group=self._group):
            try:
                point.load()  # importing the module registers its entries
            except Exception as error:  # foreign code: whatever it raises must stop nobody else
                self._broken[point.name] = _failure(point, error)
                logger.warning("%s %r left out: %s", self.kind, point.name, _failure(point, error))


def _failure(point: EntryPoint, error: Exception) -> str:
    source = f" of package {point.dist.name}" if point.dist is not None else ""
    return (
        f"entry point {point.name} = {point.value}{source} raised {type(error).__name__}: {error}"
    )
