"""JSON schemas: keywords of single values, and what they can be combined with."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.shown import shown
from headrace.sampling.grammar.regex_text import checked_regex

Pointer = tuple[str, ...]

MAX_COUNT = 1_000_000
MAX_NUMBER = 10**15
INTEGERS = (-(2**63), 2**63 - 1)  # that xgrammar counts with
MAX_MULTIPLE = 1024  # of larger ones, and in wider ranges, xgrammar holds no multiple
MAX_MULTIPLE_RANGE = 10_000
MAX_LENGTH_WITHIN_TEXT = 128  # as a pattern a length costs much

FORMATS = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
        "json-pointer",
        "relative-json-pointer",
    }
)
# xgrammar takes 010.0.0.1, too, which most readers refuse and some read as octal.
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"^({_BYTE}\.){{3}}{_BYTE}$"
INTEGER_FORMATS = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": INTEGERS,
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, INTEGERS[1]),
    "uint": (0, INTEGERS[1]),
}
"""OpenAPI's and Rust's names of ranges."""
NUMBER_FORMATS = ("float", "double")

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({*_BOUNDS, "multipleOf", "format"}),
    "number": frozenset({*_BOUNDS, "format"}),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset(
        {"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"}
    ),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "unevaluatedProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        }
    ),
}


def refused(at: Pointer, why: str) -> RequestError:
    """The error for something at a place of the schema."""
    place = "/".join(("#", *at))
    return RequestError(
        "The JSON schema cannot be used",
        why=f"at {place if len(place) <= 200 else place[:197] + '...'}: {why}",
        remedy="Leave it out, or check the answer for it",
    )


def kind_of(value: Any) -> str:
    """The type of a JSON value, in the words of schemas."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        is_whole = isinstance(value, int) or value.is_integer()
        return "integer" if is_whole else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def string_in_their_terms(keywords: dict[str, Any], within_text: bool, at: Pointer) -> None:
    """Check the form of a string and write it in xgrammar's terms, which holds a string to its
    pattern, its format or its lengths: to one of them.

    Within a text lengths become a pattern: by itself xgrammar lets control characters into strings
    with lengths, and where the answer is more than JSON nothing else keeps them out.
    """
    check_counts(keywords, ("minLength", "maxLength"), at)
    lengths = {"minLength", "maxLength"} & set(keywords)
    forms = [name for name in ("pattern", "format") if name in keywords]
    if len(forms) + bool(lengths) > 1:
        raise refused(at, f"{' and '.join([*forms, *sorted(lengths)])} cannot be combined")
    if "format" in keywords and keywords["format"] not in FORMATS:
        raise refused(
            at,
            f"format {shown(keywords['format'])} is not one of {', '.join(sorted(FORMATS))}",
        )
    if "pattern" in keywords:
        keywords["pattern"] = checked_pattern(keywords["pattern"], at)
    if keywords.get("format") == "ipv4":
        del keywords["format"]
        keywords["pattern"] = _IPV4
    if within_text and lengths:
        low, high = keywords.pop("minLength", 0), keywords.pop("maxLength", "")
        if max(low, high or 0) > MAX_LENGTH_WITHIN_TEXT:
            raise refused(at, f"within a text lengths go up to {MAX_LENGTH_WITHIN_TEXT}")
        keywords["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{low},{high}}}$'


def checked_pattern(pattern: Any, at: Pointer) -> str:
    """A pattern of strings in xgrammar's terms."""
    if not isinstance(pattern, str):
        raise refused(at, "pattern is no string")
    try:
        return checked_regex(pattern, in_json=True)
    except RequestError as error:
        raise refused(at, f"the pattern {shown(pattern)}: {error.why}") from error


def check_numbers(keywords: dict[str, Any], kinds: list[str], at: Pointer) -> None:
    """Bounds and multiples as xgrammar can count them; a format becomes bounds."""
    whole = "number" not in kinds
    low, high = INTEGERS if whole else (-MAX_NUMBER, MAX_NUMBER)
    for name in _BOUNDS:
        if name in keywords:
            value = keywords[name]
            if not _is_number(value) or not low <= value <= high:
                most = "2**63" if whole else "10**15"
                raise refused(at, f"{name} is {shown(value)}; numbers up to {most} are supported")
            if whole and not float(value).is_integer():
                raise refused(at, f"{name} of an integer is {shown(value)}, not a whole number")
    if "format" in keywords and "string" not in kinds:
        _format_as_bounds(keywords, whole, at)
    if "multipleOf" in keywords:
        if not whole:
            raise refused(at, "multipleOf is supported for type integer")
        _check_multiple(keywords, at)


def _format_as_bounds(keywords: dict[str, Any], whole: bool, at: Pointer) -> None:
    """`int32` is a range; `double` says nothing that a number would not meet."""
    name = keywords.pop("format")
    known: Mapping[str, Any] = INTEGER_FORMATS if whole else dict.fromkeys(NUMBER_FORMATS)
    if not isinstance(name, str) or name not in known:
        raise refused(at, f"format {shown(name)} is not one of {', '.join(known)}")
    if whole:
        low, high = known[name]
        keywords["minimum"] = max(keywords.get("minimum", low), low)
        keywords["maximum"] = min(keywords.get("maximum", high), high)


def _check_multiple(keywords: Mapping[str, Any], at: Pointer) -> None:
    """xgrammar counts remainders where there are no bounds, lists what two bounds hold, and passes
    over the multiple elsewhere."""
    value = keywords["multipleOf"]
    is_bounded = not keywords.keys().isdisjoint(_BOUNDS)
    most = MAX_MULTIPLE_RANGE if is_bounded else MAX_MULTIPLE
    if not (_is_number(value) and 1 <= value <= most and float(value).is_integer()):
        raise refused(at, f"multipleOf is {shown(value)}; 1 to {most} are supported")
    low = max(keywords.get("minimum", -math.inf), keywords.get("exclusiveMinimum", -math.inf) + 1)
    high = min(keywords.get("maximum", math.inf), keywords.get("exclusiveMaximum", math.inf) - 1)
    if is_bounded and high - low >= MAX_MULTIPLE_RANGE:
        raise refused(
            at,
            "multipleOf is supported without bounds, or with two that have at most "
            f"{MAX_MULTIPLE_RANGE} numbers between them",
        )


def check_counts(keywords: Mapping[str, Any], names: tuple[str, str], at: Pointer) -> None:
    """A least and a most number of something."""
    low, high = names
    for name in names:
        value = keywords.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
            raise refused(at, f"{name} is {shown(value)}; 0 to {MAX_COUNT} are supported")
    if keywords.get(low, 0) > keywords.get(high, MAX_COUNT):
        raise refused(at, f"{low} is above {high}")


def are_disjoint(one: Any, other: Any, resolve: Callable[[Any], Any]) -> bool:
    """Whether it is plain that no value meets both schemas: by type, by constants, or by a
    property that both require and whose constants differ (a discriminator)."""
    one, other = resolve(one), resolve(other)
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    constants = _constants(one), _constants(other)
    if constants[0] is not None and constants[1] is not None:
        return not constants[0] & constants[1]
    kinds = _kinds(one), _kinds(other)
    if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
        return True
    if kinds != ({"object"}, {"object"}):
        return False
    shared = set(one.get("required", [])) & set(other.get("required", []))
    for name in shared:
        mine, others = (
            _constants(resolve(each.get("properties", {}).get(name))) for each in (one, other)
        )
        if mine is not None and others is not None and not mine & others:
            return True
    return False


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Types that values of a schema can have; integers count as numbers; empty: not stated."""
    for name in ("const", "enum"):
        if name in schema:
            values = [schema["const"]] if name == "const" else schema["enum"]
            kinds = {kind_of(value) for value in values} if isinstance(values, list) else set()
            break
    else:
        stated = schema.get("type", [])
        kinds = {stated} if isinstance(stated, str) else set(map(str, stated))
    return {"number" if kind == "integer" else kind for kind in kinds}


def _constants(schema: Any) -> set[str] | None:
    """The values of `const` or `enum`, as texts; `None` without them."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {_text(value) for value in values}


def _text(value: Any) -> str:
    if _is_number(value):
        return repr(float(value))
    return json.dumps(value, sort_keys=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
