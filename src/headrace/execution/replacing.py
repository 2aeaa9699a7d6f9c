"""Attributes that hold something else for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(changes: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Set attributes, (object, name, value) each, and give them their old values at the end."""
    before: list[tuple[object, str, Any]] = []
    try:
        for owner, name, value in changes:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
