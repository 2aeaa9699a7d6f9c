"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, with the known variations."""

from collections.abc import Container

from headrace.serving.parsers.call_writer import CallWriter
from headrace.serving.parsers.json_text import (
    decoded,
    is_object,
    read_key,
    read_string,
    read_value,
)
from headrace.serving.parsers.scanner import Scanner, Steps, Unreadable

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")


def read_call(
    scanner: Scanner, calls: CallWriter, *, bare: bool = False, names: Container[str] = ()
) -> Steps[None]:
    """Read one object that is a call.

    Arguments may come before the name, as a JSON text in a string, as null, or not at all; the
    client gets an object. Other keys are passed over.

    Args:
        bare: no marker says that it is a call, so its form must: the name is one of `names`, it
            has arguments, and no keys that calls do not have.

    Raises:
        Unreadable: it is not a call.
    """
    yield from scanner.expect("{")
    name, arguments, is_live = None, None, False
    yield from scanner.skip_space()
    while (yield from scanner.peek()) != "}":
        key = yield from read_key(scanner)
        pieces: list[str] = []
        if key in NAME_KEYS and name is None:
            yield from read_string(scanner, pieces.append)
            name = decoded("".join(pieces))
            if not name or (bare and name not in names):
                raise Unreadable
        elif key in ARGUMENT_KEYS and arguments is None:
            if name is not None and (yield from scanner.peek()) == "{":
                is_live = True
                calls.start(name)
                yield from read_value(scanner, calls.arguments)
                arguments = ""
            else:
                yield from read_value(scanner, pieces.append)
                arguments = _as_object("".join(pieces))
        elif bare and key not in _OTHER_KEYS:
            raise Unreadable
        else:
            yield from read_value(scanner, pieces.append)
        yield from scanner.skip_space()
        if not (yield from scanner.accept(",")):
            break
        yield from scanner.skip_space()
        if (yield from scanner.peek()) == "}":
            raise Unreadable
    if name is None or (bare and arguments is None):
        raise Unreadable
    yield from scanner.expect("}")
    if not is_live:
        calls.start(name)
        calls.arguments(arguments or "{}")
    calls.end()


def read_call_list(scanner: Scanner, calls: CallWriter) -> Steps[None]:
    """Read a JSON array of calls; each counts once it is closed."""
    yield from scanner.expect("[")
    while True:
        yield from scanner.skip_space()
        yield from read_call(scanner, calls)
        yield from scanner.skip_space()
        if (yield from scanner.expect(",", "]")) == "]":
            return


def _as_object(text: str) -> str:
    """Arguments as an object: an object itself, or one written inside a string, or none."""
    if text.startswith('"'):
        text = decoded(text)
    elif text == "null":
        return "{}"
    if not is_object(text):
        raise Unreadable
    return text
