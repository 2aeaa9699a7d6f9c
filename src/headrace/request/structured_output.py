"""What form an answer must have. Validated when made; what a grammar library cannot hold an answer
to is refused later, by the engine, before anything runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headrace.base.errors import RequestError, UnknownFieldError
from headrace.base.shown import shown
from headrace.base.unknown_names import names_answered
from headrace.request.other_words import STRUCTURED_WORDS

MAX_TEXT_BYTES = 1 << 18  # of a schema, an expression, a grammar, or all choices together
MAX_CHOICES = 10_000
KINDS = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")


@names_answered(STRUCTURED_WORDS, "field of StructuredOutput", UnknownFieldError)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Exactly one of the forms; an answer that ends with "stop" has it.

    Attributes:
        json_schema: JSON that the schema (a dict or its text) describes, properties in its order.
        json_object: any JSON object.
        regex: the whole answer matches the expression.
        grammar: EBNF, xgrammar's dialect (that of llama.cpp's GBNF); starts at the rule `root`.
        choice: one of these strings.
        structural_tag: free text with parts whose form is fixed (xgrammar's structural tag, a dict
            or its text).
        any_whitespace: JSON may be laid out freely; otherwise it is one line, written as
            `json.dumps` does, and cannot fill up with blanks.
        special_tokens: special tokens, by their text, that the model may write where a structural
            tag has that text; else it must spell them out. The answer shows them only if
            `skip_special_tokens` is off. Those that the vocabulary has not, or that end the answer,
            do not count.

    Raises:
        RequestError: (a ValueError) naming field, value and what is allowed.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    any_whitespace: bool = False
    special_tokens: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("json_object", "any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        given = [each.name for each in fields(self) if each.name in KINDS and self._has(each.name)]
        if len(given) != 1:
            raise RequestError(
                f"structured has {' and '.join(given) or 'no form'}",
                remedy=f"Give exactly one of {', '.join(KINDS)}",
            )
        if self.any_whitespace and self.kind not in ("json_schema", "json_object"):
            raise _bad("any_whitespace", True, "only with json_schema or json_object")
        for name in ("json_schema", "structural_tag"):
            if self._has(name):
                self._set(name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar"):
            if self._has(name) and not (isinstance(getattr(self, name), str) and self.text):
                raise _bad(name, getattr(self, name), "a string that is not empty")
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        self._check_special_tokens()
        _check_size(self.kind, self.text)

    @property
    def kind(self) -> str:
        """Which of the forms it is."""
        return next(name for name in KINDS if self._has(name))

    @property
    def text(self) -> str:
        """What that form says, as text; `any_whitespace` and `special_tokens` come to it."""
        value = getattr(self, self.kind)
        if self.kind == "choice":
            return json.dumps(value, ensure_ascii=False)
        return "" if self.json_object else str(value)

    def _check_special_tokens(self) -> None:
        given: object = self.special_tokens
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        tokens = tuple(given) if isinstance(given, Sequence) else ()
        if not is_list or not all(isinstance(each, str) and each for each in tokens):
            raise _bad("special_tokens", given, "a list of texts that are not empty")
        if tokens and self.structural_tag is None:
            raise _bad("special_tokens", given, "only with structural_tag")
        self._set("special_tokens", tokens)

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and (value is not False or name == "json_schema")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # normalising a frozen field, once, while it is made


def _json_text(name: str, value: object) -> str:
    """The text of a JSON value that came as text or as objects: canonical, order kept."""
    allowed = "a JSON object, as a dict or as text"
    try:
        if isinstance(value, str):
            _check_size(name, value)
            value = json.loads(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RequestError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(
            f"{name} is no JSON: {type(error).__name__}: {str(error)[:200]}",
            remedy=f"Allowed: {allowed}",
        ) from None
    if not isinstance(value, dict) and not (name == "json_schema" and isinstance(value, bool)):
        raise _bad(name, value, allowed)
    return text


def _choices(value: object) -> tuple[str, ...]:
    allowed = f"1 to {MAX_CHOICES} strings that are not empty"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | set):
        raise _bad("choice", value, allowed)
    choices = tuple(value)
    is_text = all(isinstance(each, str) and each for each in choices)
    if not choices or len(choices) > MAX_CHOICES or not is_text:
        raise _bad("choice", value, allowed)
    return tuple(dict.fromkeys(choices))


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds half of a surrogate pair") from None
    if size > MAX_TEXT_BYTES:
        raise RequestError(
            f"{name} has {size} bytes", remedy=f"Allowed: at most {MAX_TEXT_BYTES} bytes"
        )
    if "\0" in text:
        raise RequestError(f"{name} holds a NUL character", remedy="Leave it out")


def _bad(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"structured: {name} is {shown(value)}", remedy=f"Allowed: {allowed}")
