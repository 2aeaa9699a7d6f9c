"""What the parts of a start take, in seconds and bytes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.base.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupPart:
    """One part of assembly: what it took."""

    name: str
    seconds: float
    bytes: int


class Startup:
    """The parts of one start, in their order; the log tells of each when it is over."""

    def __init__(self) -> None:
        self.parts: list[StartupPart] = []

    @contextmanager
    def part(self, name: str, took: Callable[[], int]) -> Iterator[None]:
        """Within: a part; `took`: its bytes, asked at the end."""
        start = time.perf_counter()
        yield
        part = StartupPart(name=name, seconds=time.perf_counter() - start, bytes=took())
        self.parts.append(part)
        log.info("%s: %.2f s, %.1f MiB", part.name, part.seconds, part.bytes / 2**20)
