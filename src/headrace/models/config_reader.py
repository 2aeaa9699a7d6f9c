"""Typed reading of a checkpoint's config.json.

A checkpoint's config is somebody else's file: a key may be missing, null where it is unset, or of
another type. What is read here has the type it says, or the error names key, value and expectation.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from headrace.base.errors import CheckpointError

T = TypeVar("T")
Config = Mapping[str, Any]


def whole(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number; null and a missing key give `default`, an error without one."""
    value = optional_whole(config, key)
    return _required(key, default if value is None else value, "a positive whole number")


def optional_whole(config: Config, key: str) -> int | None:
    """A positive whole number, or None when missing, null or 0 (all are written for "unset")."""
    value = config.get(key)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(config, key, "a positive whole number")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A finite positive number; null and a missing key give `default`, an error without one."""
    value = optional_number(config, key)
    return _required(key, default if value is None else value, "a positive number")


def optional_number(config: Config, key: str) -> float | None:
    """A finite positive number, or None when missing, null or 0."""
    value = config.get(key)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise _wrong(config, key, "a positive number")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(config, key, "true or false")
    return value


def text(config: Config, key: str, default: str | None = None) -> str:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(config, key, "a string")
    return _required(key, default if value is None else value, "a string")


def numbers(config: Config, key: str) -> tuple[float, ...] | None:
    """A list of numbers, or None."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, Sequence) or not all(
        _is_number(item) and abs(item) <= sys.float_info.max for item in value
    ):
        raise _wrong(config, key, "a list of numbers, all of them finite")
    return tuple(float(item) for item in value)


def texts(config: Config, key: str) -> tuple[str, ...] | None:
    """A list of strings, or None."""
    value = config.get(key)
    if value is None:
        return None
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not all(isinstance(item, str) for item in value):
        raise _wrong(config, key, "a list of strings")
    return tuple(value)


def section(config: Config, key: str) -> Config | None:
    """A nested object, or None when missing, null or empty."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(config, key, "an object")
    return value or None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _required(key: str, value: T | None, expectation: str) -> T:
    if value is None:
        raise CheckpointError(
            f"The model's config has no {key}",
            why=f"{expectation} is needed there",
            remedy="Check that config.json is complete",
        )
    return value


def _wrong(config: Config, key: str, expectation: str) -> CheckpointError:
    return CheckpointError(
        f"{key} in the model's config is {config.get(key)!r}", why=f"it must be {expectation}"
    )
