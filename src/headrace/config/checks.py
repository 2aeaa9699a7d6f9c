"""What a field may hold, one check per kind of field.

A check takes the name of the field and its value, and returns the value made plain: numbers of
other libraries become Python's, paths become texts. What is of another type or out of range is a
`ConfigError` that names field, value and what is allowed. Types are tested before anything is
compared: an array must not be asked for its truth.
"""

import os
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.shown import shown
from headrace.config.other_words import ATTENTION_NAMES, DTYPE_NAMES

Check = Callable[[str, Any], Any]

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1


def text(allowed: str) -> Check:
    """A text that is not empty, or a path."""

    def check(name: str, value: Any) -> str:
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(plain, str) or not plain.strip():
            raise _refusal(name, value, allowed)
        return plain

    return check


def one_of(*allowed: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise _refusal(name, value, ", ".join(allowed))
        return value

    return check


def dtype_name(*allowed: str) -> Check:
    """The name of a dtype, in one of the ways it is written, or torch's object."""

    def check(name: str, value: Any) -> str:
        plain = str(value) if type(value).__name__ == "dtype" else value
        if isinstance(plain, str):
            plain = plain.removeprefix("torch.")
            plain = DTYPE_NAMES.get(plain, plain)
            if plain in allowed:
                return plain
        raise _refusal(name, value, ", ".join(allowed))

    return check


def backend_name() -> Check:
    """The name of an attention backend, ours or vLLM's; which there are is for the plan to say."""
    name_of = text("names of registered backends")

    def check(name: str, value: Any) -> str:
        plain: str = name_of(name, value)
        return ATTENTION_NAMES.get(plain, plain)

    return check


def whole(low: int, high: int, among: tuple[int, ...] | None = None) -> Check:
    """An integer, of Python or of another library; True and False are none."""
    allowed = f"whole numbers from {low} to {high}"
    if among is not None:
        allowed = ", ".join(map(str, among))

    def check(name: str, value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise _refusal(name, value, allowed)
        plain = int(value)
        if not low <= plain <= high or (among is not None and plain not in among):
            raise _refusal(name, value, allowed)
        return plain

    return check


def fraction(name: str, value: Any) -> float:
    """A number above 0 and up to 1."""
    allowed = "numbers in (0, 1]"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _refusal(name, value, allowed)
    # Compared first: a number far beyond the range may have no float.
    if value <= 0 or not value <= 1 or float(value) == 0.0:
        raise _refusal(name, value, allowed)
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, value, "True or False")
    return value


def sizes(*words: str) -> Check:
    """One of the words, or a list of sizes, which becomes a tuple."""
    allowed = f"{', '.join(words)}, or a list of whole numbers of at least 1"
    size = whole(1, MAX_INT32)

    def check(name: str, value: Any) -> str | tuple[int, ...]:
        if isinstance(value, str) and value in words:
            return value
        if not isinstance(value, list | tuple) or not value:
            raise _refusal(name, value, allowed)
        try:
            return tuple(size(name, each) for each in value)
        except ConfigError:
            raise _refusal(name, value, allowed) from None

    return check


def wholes(low: int, high: int) -> Check:
    """A list of integers, perhaps empty, which becomes a tuple."""
    allowed = f"a list of whole numbers from {low} to {high}"
    number = whole(low, high)

    def check(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise _refusal(name, value, allowed)
        try:
            return tuple(number(name, each) for each in value)
        except ConfigError:
            raise _refusal(name, value, allowed) from None

    return check


def optional(one: Check) -> Check:
    """`None`, for what follows from model and device, or what `one` takes."""

    def check(name: str, value: Any) -> Any:
        try:
            return None if value is None else one(name, value)
        except ConfigError as error:
            raise ConfigError(error.what, remedy=f"{error.remedy}; or left out (None)") from None

    return check


def _refusal(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {shown(value)}", remedy=f"Allowed: {allowed}")
