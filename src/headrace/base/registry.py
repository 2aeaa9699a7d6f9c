"""A name -> thing table that third parties can extend through entry points."""

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from headrace.base.errors import UnsupportedError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names with one or more entries each, in order of registration.

    Args:
        kind: what the entries are, for messages ("attention backend").
        group: entry-point group read on the first look-up, or None.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self._group = group
        self._entries: dict[str, list[T]] = {}
        self._plugins_loaded = False

    def register(self, *names: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            for name in names:
                self._entries.setdefault(name, []).append(entry)
            return entry

        return add

    def entries(self, name: str) -> tuple[T, ...]:
        """All entries under `name`; raises `UnsupportedError` listing the known names."""
        self._load_plugins()
        if name not in self._entries:
            raise UnsupportedError(
                f"Unknown {self.kind} {name!r}", remedy=f"Known: {', '.join(sorted(self._entries))}"
            )
        return tuple(self._entries[name])

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
            point.load()  # importing the module registers its entries
