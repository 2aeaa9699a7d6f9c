"""Command-line flags made from the fields of a dataclass, so that both speak the same words.

A field `max_model_len` becomes `--max-model-len` (`--max_model_len` is taken too). Only flags that
were given reach the dataclass, which alone knows the defaults and the ranges.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_origin, get_type_hints

from headrace.cli.parser import default_text


def flag_of(option: str) -> str:
    """--max-model-len for max_model_len"""
    return "--" + option.replace("_", "-")


def add_field_flags(
    parser: argparse.ArgumentParser,
    described: type,
    *,
    sections: Mapping[str, str],
    help_of: Mapping[str, str],
    rename: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
    readers: Mapping[str, Mapping[str, Any]] | None = None,
    note: str | None = None,
) -> None:
    """Give `parser` one flag for each field of the dataclass `described`.

    Args:
        sections: field -> heading in `--help` of those from it on; has the first field.
        help_of: a sentence for each field.
        rename: field -> name of its flag where another flag has that name already.
        skip: fields that are not flags.
        readers: field -> argparse options, where its type does not tell how it is read.
        note: what stands below the first heading.
    """
    group: argparse._ArgumentGroup | None = None
    hints = get_type_hints(described)
    for entry in fields(described):
        if entry.name in skip:
            continue
        if entry.name in sections:
            group = parser.add_argument_group(sections[entry.name], note if group is None else None)
        assert group is not None, f"{entry.name} comes before the first section"
        flag = flag_of((rename or {}).get(entry.name, entry.name))
        options: dict[str, Any] = {
            "dest": destination(described, entry.name),
            "default": argparse.SUPPRESS,
            "help": help_of[entry.name].replace("%", "%%") + _default(entry),
        }
        reader = (readers or {}).get(entry.name) or _reader(hints[entry.name])
        group.add_argument(flag, **options, **reader)


def _default(entry: Field[Any]) -> str:
    """The default for the help; `None` and empty ones mean that nothing is asked."""
    return "" if entry.default in (None, (), MISSING) else default_text(entry.default)


def given_fields(arguments: argparse.Namespace, described: type) -> dict[str, Any]:
    """The fields of `described` whose flags were given."""
    names = {destination(described, entry.name): entry.name for entry in fields(described)}
    return {names[key]: value for key, value in vars(arguments).items() if key in names}


def destination(described: type, name: str) -> str:
    """Where argparse keeps a field: two dataclasses may have fields of one name."""
    return f"{described.__name__}.{name}"


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """`--max_model_len=5` as `--max-model-len=5`; values and everything after `--` stay."""
    plain: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return plain + list(arguments[index:])
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        plain.append(argument)
    return plain


def _reader(hint: Any) -> dict[str, Any]:
    """argparse options that read a value of the annotated type."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    if get_origin(hint) in (Sequence, Mapping, tuple):
        kinds = [hint]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    for kind in kinds:
        origin, parts = get_origin(kind), get_args(kind)
        if origin is tuple and str in kinds:
            return {"type": _graph_sizes, "metavar": "SIZES"}
        if origin is tuple:
            return {"type": integers, "metavar": "N,N,..."}
        if origin is Sequence and str in parts:
            return {"action": "append", "metavar": "TEXT"}
        if origin is Sequence:
            return {"type": integers, "metavar": "ID,ID,..."}
        if origin is not None and issubclass(origin, Mapping):
            return {"type": _biases, "metavar": "ID=BIAS,..."}
    for kind, reader, metavar in (
        (float, _number, "X"),
        (int, integer, "N"),
        (str, str, "NAME"),
    ):
        if kind in kinds:
            return {"type": reader, "metavar": metavar}
    raise AssertionError(f"no reader for {hint}")


def _graph_sizes(text: str) -> str | tuple[int, ...]:
    return text if text.isalpha() else integers(text)


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number like 4096") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number like 0.5") from None


def integers(text: str) -> tuple[int, ...]:
    """1,2,4"""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,4") from None


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = (part.split("=") for part in text.split(","))
        return {int(token): float(value) for token, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 50=-100,7=2.5") from None


def positive(text: str) -> int:
    """A whole number of at least 1, for flags that are no dataclass field."""
    return _at_least(1, text)


def at_least_two(text: str) -> int:
    return _at_least(2, text)


def whole(text: str) -> int:
    """A whole number, 0 included."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def positives(text: str) -> tuple[int, ...]:
    """1,16: numbers of at least 1."""
    return tuple(positive(part) for part in text.split(","))
