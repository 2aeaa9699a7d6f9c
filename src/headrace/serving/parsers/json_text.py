"""JSON read as it comes: checked character by character, handed on as it was written.

Numbers, escapes, white space and the order of keys stay the model's. One thing is mended, because
it loses nothing and models do it: a raw control character inside a string (a line break, say) is
written as its escape. Anything else that is not JSON (RFC 8259) is `Unreadable`.
"""

import json
import re
from collections.abc import Callable

from headrace.serving.parsers.scanner import SPACE, Scanner, Steps, Unreadable

DEEPEST = 200  # clients' own parsers give up at about 1000

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ATOM_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]+")
_ATOM = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_LONGEST_ATOM = 1000

Out = Callable[[str], None]


def read_value(scanner: Scanner, out: Out) -> Steps[None]:
    """Read one value and hand on its text; white space before it is not part of it."""
    yield from scanner.skip_space()
    closers: list[str] = []
    while True:
        character = yield from scanner.peek()
        if character in ("{", "["):
            out(scanner.take(1))
            closers.append("}" if character == "{" else "]")
            if len(closers) > DEEPEST:
                raise Unreadable
            out((yield from scanner.skip_space()))
            if (yield from scanner.peek()) != closers[-1]:
                if character == "{":
                    yield from _key(scanner, out)
                continue
        elif character == '"':
            yield from read_string(scanner, out)
        else:
            yield from _atom(scanner, out)
        if not (yield from _goes_on(scanner, closers, out)):
            return


def read_string(scanner: Scanner, out: Out) -> Steps[None]:
    """Read a string with its quotes."""
    out((yield from scanner.expect('"')))
    while True:
        character = yield from scanner.peek()
        if not character:
            raise Unreadable
        if character == '"':
            out(scanner.take(1))
            return
        if character == "\\":
            out((yield from _escape(scanner)))
        elif character < " ":
            out(json.dumps(scanner.take(1))[1:-1])
        else:
            plain = _PLAIN.match(scanner.text, scanner.at)
            assert plain is not None
            out(scanner.take(plain.end() - plain.start()))


def read_key(scanner: Scanner) -> Steps[str]:
    """Read a key and its colon, and give the key back decoded."""
    pieces: list[str] = []
    yield from _key(scanner, pieces.append)
    return decoded("".join(pieces).rpartition('"')[0] + '"')


def decoded(text: str) -> str:
    """What a JSON string means.

    Raises:
        Unreadable: it holds half of a surrogate pair, which no UTF-8 can carry.
    """
    value = json.loads(text)
    assert isinstance(value, str)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unreadable from None
    return value


def is_object(text: str) -> bool:
    """Whether the text is one JSON object and nothing else."""
    return text.lstrip(SPACE).startswith("{") and is_value(text)


def is_value(text: str) -> bool:
    """Whether the text is one JSON value and nothing else."""
    scanner = Scanner()
    scanner.push(text)
    scanner.close()
    try:
        for _ in read_value(scanner, lambda _: None):
            raise AssertionError("a closed text waits for nothing")
    except Unreadable:
        return False
    return not scanner.text[scanner.at :].strip(SPACE)


def _key(scanner: Scanner, out: Out) -> Steps[None]:
    yield from read_string(scanner, out)
    out((yield from scanner.skip_space()))
    out((yield from scanner.expect(":")))
    out((yield from scanner.skip_space()))


def _goes_on(scanner: Scanner, closers: list[str], out: Out) -> Steps[bool]:
    """After a value: whether another comes inside the brackets that are still open."""
    while closers:
        out((yield from scanner.skip_space()))
        character = yield from scanner.peek()
        if character == closers[-1]:
            out(scanner.take(1))
            closers.pop()
        elif character == ",":
            out(scanner.take(1))
            out((yield from scanner.skip_space()))
            if closers[-1] == "}":
                yield from _key(scanner, out)
            return True
        else:
            raise Unreadable
    return False


def _escape(scanner: Scanner) -> Steps[str]:
    kind = yield from scanner.peek(1)
    if kind == "u":
        for ahead in range(2, 6):
            digit = yield from scanner.peek(ahead)
            if digit not in tuple("0123456789abcdefABCDEF"):
                raise Unreadable
        return scanner.take(6)
    if not kind or kind not in '"\\/bfnrt':
        raise Unreadable
    return scanner.take(2)


def _atom(scanner: Scanner, out: Out) -> Steps[None]:
    size = 0
    while size <= _LONGEST_ATOM:
        character = yield from scanner.peek(size)
        if not (character and _ATOM_CHARACTERS.fullmatch(character)):
            break
        size += 1
    if not _ATOM.fullmatch(scanner.text, scanner.at, scanner.at + size):
        raise Unreadable
    out(scanner.take(size))
