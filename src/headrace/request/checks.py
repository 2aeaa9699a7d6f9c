"""What a field of a request may hold.

Values are made plain, or refused by a `RequestError` that names field, value and what is allowed.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.shown import shown


def bad_value(name: str, value: object, allowed: str) -> RequestError:
    """The refusal of a value; `allowed` says what would do."""
    return RequestError(f"{name} is {shown(value)}", remedy=f"Allowed: {allowed}")


def listed(name: str, value: object, allowed: str) -> tuple[Any, ...]:
    """What a list, an array or an iterator holds; an array without dimensions holds nothing."""
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise bad_value(name, value, allowed) from None


def some_of(
    name: str, value: object, known: Sequence[str], *, may_be_empty: bool = False
) -> tuple[str, ...]:
    """The texts of a list, each once, all of them `known`."""
    remedy = f"Give a list of some of {', '.join(known)}"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {shown(value)}", remedy=remedy)
    try:
        texts = tuple(value)
    except TypeError:  # an array without dimensions
        raise RequestError(f"{name} is {shown(value)}", remedy=remedy) from None
    if unknown := [each for each in texts if not isinstance(each, str) or each not in known]:
        raise RequestError(f"{name} has {shown(unknown[0])}", remedy=remedy)
    if not texts and not may_be_empty:
        raise RequestError(f"{name} is empty", remedy=remedy)
    return tuple(dict.fromkeys(texts))


def switch(name: str, value: object) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise bad_value(name, value, "True or False")
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int. Integers of other libraries count; True and False do not."""
    allowed = f"integers in [{low}, {high}]"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise bad_value(name, value, allowed)
    if not low <= int(value) <= high:
        raise bad_value(name, value, allowed)
    return int(value)


def at_least(name: str, value: object, least: int) -> None:
    """Refuse what is neither `None` nor one of Python's own integers from `least` on."""
    if value is not None and (type(value) is not int or value < least):
        raise RequestError(f"{name} is {shown(value)}", remedy=f"Give a number from {least} on")


def number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """`value` as a float. NaN and integers beyond the floats fail like any number out of range."""
    allowed = f"numbers in {'(' if open_low else '['}{low:g}, {high:g}]"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise bad_value(name, value, allowed)
    try:
        plain = float(value)
    except OverflowError:
        raise bad_value(name, value, allowed) from None
    if not low <= plain <= high or (open_low and plain == low):
        raise bad_value(name, value, allowed)
    return plain
