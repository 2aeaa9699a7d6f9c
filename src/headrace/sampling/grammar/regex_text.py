"""Regular expressions: what xgrammar would read otherwise than everybody is refused.

xgrammar matches the whole answer and refuses back references and the like by itself. In a JSON
string it passes over look-ahead and flags. It passes over anchors in the middle, takes unknown
escapes for the letter, lets a dot match a line break, has blanks of its own, and writes what an
expression spells into a JSON string as it is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.base.errors import RequestError

MAX_CHARACTERS = 8192  # the time to compile grows faster than their number
MAX_GROUPS = 100  # within each other: xgrammar goes down them on the stack of its thread
_CLASSES = "dDwWsS"
_CONTROLS = "nrtfv"
_NUMBERED = "xu"
_PLAIN_GROUP = re.compile(r"\?(?::|<[A-Za-z_]\w*>)")  # (?:...), (?<name>...)


@dataclass(frozen=True, slots=True)
class _Atom:
    """A character, an escape with what is written behind it, or a class of characters as one."""

    at: int
    text: str


def checked_regex(text: str, *, in_json: bool = False) -> str:
    """The expression in xgrammar's terms, with the meaning that Python's `re.fullmatch` gives it
    (classes like \\d in ASCII).

    Args:
        in_json: it describes the inside of a JSON string, so nothing may need an escape there.

    Raises:
        RequestError: it says something that would be passed over.
    """
    if len(text) > MAX_CHARACTERS:
        raise _refused(text, MAX_CHARACTERS, f"more than {MAX_CHARACTERS} characters")
    depth = 0
    parts: list[str] = []
    atoms = list(_atoms(text))
    for place, atom in enumerate(atoms):
        before = atoms[place - 1].text if place else None
        after = atoms[place + 1].text if place + 1 < len(atoms) else None
        depth += (atom.text == "(") - (atom.text == ")")
        if depth > MAX_GROUPS:
            raise _refused(text, atom.at, f"more than {MAX_GROUPS} groups within each other")
        if atom.text == "^" and not (depth == 0 and before in (None, "|")):
            raise _refused(text, atom.at, "'^' stands where no answer begins")
        if atom.text == "$" and not (depth == 0 and after in (None, "|")):
            raise _refused(text, atom.at, "'$' stands where no answer ends")
        if atom.text == "(" and after == "?" and not _PLAIN_GROUP.match(text, atom.at + 1):
            raise _refused(text, atom.at, "look-around and flags are not supported")
        if atom.text.startswith("["):
            parts.append(_class(text, atom, in_json))
            continue
        if atom.text.startswith("\\"):
            _check_escape(text, atom.at, atom.text[1], in_json)
        elif in_json and (atom.text == '"' or atom.text < " "):
            raise _refused(text, atom.at, "this character needs an escape in JSON")
        if atom.text == "." and not in_json:
            parts.append("[^\\n]")
        elif atom.text == "\\s":
            parts.append(f"[{_blanks(in_json)}]")
        elif atom.text == "\\S":
            parts.append(f"[^{_blanks(False)}]")
        else:
            parts.append(atom.text)
    return "".join(parts)


def _atoms(text: str) -> Iterator[_Atom]:
    at = 0
    while at < len(text):
        size = 1
        if text[at] == "\\":
            size = 2
        elif text[at] == "[":
            size = _class_end(text, at) - at
        if at + size > len(text):
            raise _refused(text, at, "it ends in the middle")
        yield _Atom(at, text[at : at + size])
        at += size


def _class_end(text: str, start: int) -> int:
    at = start + 1
    while at < len(text) and text[at] != "]":
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _class(text: str, atom: _Atom, in_json: bool) -> str:
    """A class of characters, with the blanks of \\s written out."""
    parts: list[str] = []
    inside = atom.text[1:-1]
    if inside in ("", "^"):
        raise _refused(text, atom.at, "']' within a class needs an escape")
    negated = inside.startswith("^")  # of these xgrammar leaves out what JSON escapes
    at = 0
    while at < len(inside):
        if inside[at] == "\\":
            letter = inside[at + 1]
            _check_escape(text, atom.at + 1 + at, letter, in_json and not negated)
            if letter == "S":
                raise _refused(text, atom.at + 1 + at, "'\\S' within a class is not supported")
            blanks = _blanks(in_json and not negated)
            parts.append(blanks if letter == "s" else inside[at : at + 2])
            at += 2
            continue
        if in_json and not negated and (inside[at] == '"' or inside[at] < " "):
            raise _refused(text, atom.at + 1 + at, "this character needs an escape in JSON")
        if inside.startswith(("[:", "&&", "--"), at):
            raise _refused(text, atom.at + 1 + at, "sets of classes are not supported")
        parts.append(inside[at])
        at += 1
    return f"[{''.join(parts)}]"


def _blanks(in_json: bool) -> str:
    """What \\s stands for; all but the space need an escape in JSON."""
    return " " if in_json else " \\t\\n\\r\\f\\v"


def _check_escape(text: str, at: int, letter: str, in_json: bool) -> None:
    known = letter in _CLASSES + _CONTROLS + _NUMBERED or not letter.isalnum()
    if not known:
        raise _refused(text, at, f"the escape '\\{letter}' is not supported")
    if in_json and (letter in _CONTROLS + _NUMBERED or letter in '"\\'):
        raise _refused(text, at, f"'\\{letter}' spells what may need an escape in JSON")


def _refused(text: str, at: int, why: str) -> RequestError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return RequestError(
        f"The regular expression {shown!r} cannot be used",
        why=f"at character {at}: {why}",
        remedy="Write it without, or use a grammar",
    )
