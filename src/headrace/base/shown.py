"""What somebody sent, and many names, as a message shows them: short, on one line."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath

MOST = 80


def shown(value: object, most: int = MOST) -> str:
    """`repr` of the value, at most `most` characters; its type where it cannot be printed.

    Of lists, dicts and texts no more is written than is shown, so that millions of entries cost
    what a few do.
    """
    try:
        text = ""
        for piece in _pieces(value, 2 * most):
            text += piece
            if len(text) > 2 * most:
                break
        text = " ".join(text.split())
    except Exception:  # such as an integer of thousands of digits, or a __repr__ that fails
        text = f"of type {type(value).__name__} and cannot be printed"
    return text if len(text) <= most else text[: most - 3] + "..."


def first_of(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: no more names than `most`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _pieces(value: object, most: int) -> Iterator[str]:
    """`repr` of the value bit by bit, of a path that of its text; texts are cut behind `most`
    characters."""
    kind = type(value)
    if isinstance(value, str | bytes) and kind in (str, bytes):
        yield repr(value[: most + 1])
    elif isinstance(value, list | tuple | dict) and kind in (list, tuple, dict):
        opening, closing = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}[kind]
        yield opening
        for place, key in enumerate(value):
            if place:
                yield ", "
            yield from _pieces(key, most)
            if isinstance(value, dict):
                yield ": "
                yield from _pieces(value[key], most)
        yield f",{closing}" if kind is tuple and len(value) == 1 else closing
    elif isinstance(value, PurePath):
        yield from _pieces(str(value), most)
    else:
        yield repr(value)
