"""Names that a caller uses and we do not have: which of ours was meant, or why there is none."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from headrace.base.errors import HeadraceError
from headrace.base.shown import shown

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
NOT_HERE = "this version does not have it"
TEXT_ONLY = "models here read and write text only"
_LONGEST = 100  # characters of a name that is compared with ours
_NEAR = 0.7  # of difflib: stop_ids is near to stop_token_ids, max_length to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWords:
    """What other engines call things.

    Attributes:
        renamed: their name -> ours; the value stays as it is.
        switches: their switch -> our options with their values; none: it is always so.
        advice: their name -> what to use in its place, or why there is nothing.
        families: a word in their names, as the lora of enable_lora -> why there are none of these.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)
    families: Mapping[str, str] = field(default_factory=dict)

    def exact_answer(self, name: str) -> str:
        """What to write in place of one of these words; "" where it is none."""
        if name in self.renamed:
            return f"use {self.renamed[name]}"
        if name in self.switches:
            ours = [f"{option}={value!r}" for option, value in self.switches[name].items()]
            return f"use {', '.join(ours)}" if ours else "it is always so; leave it out"
        if name in self.advice:
            return self.advice[name]
        parts = name.replace("-", "_").split("_")
        return next((self.families[part] for part in parts if part in self.families), "")

    def answer(self, name: str, known: Collection[str]) -> str:
        """What to write in place of `name`, which is none of `known`; "" where nobody knows."""
        name = name[:_LONGEST]
        if exact := self.exact_answer(name):
            return exact
        if close := get_close_matches(name, known, n=1, cutoff=_NEAR):
            return f"did you mean {close[0]}?"
        theirs = (*self.renamed, *self.switches, *self.advice)
        if close := get_close_matches(name, theirs, n=1, cutoff=0.8):
            return f"as for {close[0]}: {self.exact_answer(close[0])}"
        return ""


def names_answered(
    words: OtherWords, kind: str, error: type[HeadraceError]
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass answer keywords that it has no field for with `error`.

    Args:
        kind: what its fields are, as "option of the engine".
    """

    def answering(described: type[T]) -> type[T]:
        known = [each.name for each in fields(described)]  # type: ignore[arg-type]
        made = _answering(described.__init__, known, words, kind, error)
        described.__init__ = made  # type: ignore[method-assign]
        return described

    return answering


def arguments_answered(
    words: OtherWords, kind: str, error: type[HeadraceError]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same for the keywords of a method.

    Args:
        kind: as "argument of generate".
    """

    def answering(method: Callable[P, R]) -> Callable[P, R]:
        _, *known = signature(method).parameters
        return _answering(method, known, words, kind, error)

    return answering


def attributes_answered(words: OtherWords) -> Callable[[type[T]], type[T]]:
    """Make the objects of a class answer attributes that they have not, still by AttributeError."""

    def answering(described: type[T]) -> type[T]:
        def missing(self: T, name: str) -> Any:
            answer = words.exact_answer(name)
            told = f" ({answer})" if answer else ""
            raise AttributeError(
                f"{described.__name__} has no attribute {name}{told}", name=name, obj=self
            )

        described.__getattr__ = missing  # type: ignore[attr-defined]
        return described

    return answering


def _answering(
    function: Callable[P, R],
    known: Collection[str],
    words: OtherWords,
    kind: str,
    error: type[HeadraceError],
) -> Callable[P, R]:
    """Put a look at the keywords in front of a function."""
    known_keys = frozenset(known)

    @functools.wraps(function)
    def looking(*values: P.args, **named: P.kwargs) -> R:
        if not named.keys() <= known_keys:
            unknown = [name for name in named if name not in known_keys]
            raise _unknown(unknown, known, words, kind, error)
        return function(*values, **named)

    return looking


def _unknown(
    names: Iterable[str],
    known: Collection[str],
    words: OtherWords,
    kind: str,
    error: type[HeadraceError],
) -> HeadraceError:
    answers = {name: words.answer(name, known) for name in names}
    listed = [
        shown(name).strip("'") + (f" ({answer})" if answer else "")
        for name, answer in answers.items()
    ]
    several = "s" if len(listed) > 1 else ""
    remedy = "" if all(answers.values()) else f"There are {', '.join(known)}"
    noun, _, owner = kind.partition(" ")
    return error(f"Unknown {noun}{several} {owner}: {', '.join(listed)}", remedy=remedy)
