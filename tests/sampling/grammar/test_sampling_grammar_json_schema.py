"""Schemas: what is let through holds (random answers against `jsonschema`), the rest is refused."""

import json
from typing import Any

import jsonschema
import pytest
from grammar_walks import accepts, backend, form, walk

from headrace.base.errors import RequestError
from headrace.sampling.grammar.json_schema import checked_schema

INTEGER, STRING, NUMBER = {"type": "integer"}, {"type": "string"}, {"type": "number"}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
        }
    },
}


def branch(kind: str) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, kind: {"type": "boolean"}}
    return {"type": "object", "properties": properties, "required": ["kind"]}


SUPPORTED: dict[str, Any] = {
    "anything": {},
    "true": True,
    "annotations": {"title": "T", "description": "d", "default": 1, "x-own": 1, "type": "integer"},
    "types": {"type": ["integer", "null", "boolean"]},
    "mixed types": {"type": ["string", "integer"], "maxLength": 2, "minimum": 3},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "no text": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2,3}-\\d+$"},
    "pattern dot": {"type": "string", "pattern": "^.{1,3}x$"},
    "pattern not": {"type": "string", "pattern": '^[^a"]{1,4}$'},
    "pattern class": {"type": "string", "pattern": "^[ -~]{3}\\w\\s\\d$"},
    "pattern open": {"type": "string", "pattern": "b+"},
    "uuid": {"type": "string", "format": "uuid"},
    "date": {"type": "string", "format": "date-time"},
    "integer range": {"type": "integer", "minimum": -17, "maximum": 1234},
    "integer open range": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 12},
    "integer above": {"type": "integer", "minimum": 98},
    "whole float bound": {"type": "integer", "minimum": 2.0, "maximum": 11.0},
    "multiple": {"type": "integer", "multipleOf": 7},
    "multiple in range": {"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 40},
    "multiple in long range": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 10_000},
    "largest multiple": {"type": "integer", "multipleOf": 1024},
    "safe integers": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    "all integers": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "number range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "number open range": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number above": {"type": "number", "exclusiveMinimum": 3},
    "enum": {"enum": [1, "a", None, True, {"b": [1.5, "é\n"]}, [], 0.1, -2.0]},
    "enum with type": {"type": "string", "enum": ['q"uo\\te', "😀", "\u2028", "a/b"]},
    "const": {"const": {"a": 1}},
    "array": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
    "no items": {"type": "array", "items": False},
    "uniqueItems false": {"type": "array", "items": INTEGER, "uniqueItems": False, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [INTEGER], "items": STRING, "minItems": 2},
    "unevaluatedItems": {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False},
    "object": {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "required": ["b"]},
    "object of any": {"type": "object"},
    "without type": {"properties": {"a": INTEGER}, "required": ["a"]},
    "closed": {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False},
    "open": {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
    "odd names": {"type": "object", "properties": {'a"b\\é\n': INTEGER}, "required": ['a"b\\é\n']},
    "map": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 3},
    "some properties": {
        "type": "object",
        "properties": {"a": INTEGER, "b": STRING, "c": INTEGER},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "names by pattern": {"type": "object", "patternProperties": {"^x[0-9]$": INTEGER}},
    "names by length": {"type": "object", "propertyNames": {"maxLength": 2}, "maxProperties": 2},
    "names by enum": {
        "type": "object",
        "propertyNames": {"enum": ["k", "l"]},
        "additionalProperties": INTEGER,
    },
    "anyOf": {"anyOf": [INTEGER, {"type": "null"}, {"const": "x"}]},
    "oneOf types": {"oneOf": [INTEGER, STRING, {"enum": [None, True]}]},
    "oneOf discriminated": {"oneOf": [branch("one"), branch("two")], "discriminator": {}},
    "oneOf behind refs": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": branch("one"), "b": branch("two")},
    },
    "allOf one": {"allOf": [{"type": "integer", "minimum": 5}]},
    "recursion": TREE,
    "ref escapes": {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": INTEGER}},
    "ref elsewhere": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}},
    },
}

REFUSED: dict[str, tuple[Any, str]] = {
    "false": (False, "no schema that an answer can meet"),
    "unknown type": ({"type": "text"}, "unknown"),
    "no types": ({"type": []}, "neither a name"),
    "misspelt": ({"type": "string", "maxlength": 3}, "maxLength?"),
    "without type": ({"minimum": 3}, "needs type"),
    "other type": ({"type": "integer", "maxLength": 3}, "says nothing about type integer"),
    "nullable": ({"type": "string", "nullable": True}, "nullable is not supported"),
    "not": ({"not": STRING}, "not is not supported"),
    "type and not": ({"type": "integer", "not": {"const": 1}}, "not is not supported"),
    "if": ({"if": STRING, "then": {"maxLength": 1}}, "if is not supported"),
    "contains": ({"type": "array", "contains": {"const": 3}}, "contains is not supported"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "items list": ({"type": "array", "items": [INTEGER]}, "no schema"),
    "additionalItems": ({"type": "array", "additionalItems": INTEGER}, "additionalItems"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentReq"),
    "contentEncoding": ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
    "unknown format": ({"type": "string", "format": "regex"}, "format"),
    "pattern and length": ({"type": "string", "pattern": "a*", "maxLength": 2}, "combined"),
    "format and length": ({"type": "string", "format": "date", "maxLength": 2}, "combined"),
    "pattern quote": ({"type": "string", "pattern": 'a"b'}, "escape in JSON"),
    "pattern newline": ({"type": "string", "pattern": "a\\nb"}, "escape in JSON"),
    "pattern backslash": ({"type": "string", "pattern": "\\\\"}, "escape in JSON"),
    "pattern anchor": ({"type": "string", "pattern": "a^b"}, "no answer begins"),
    "pattern look-ahead": ({"type": "string", "pattern": "^(?=a).*$"}, "look-around"),
    "pattern flags": ({"type": "string", "pattern": "(?i)a"}, "flags"),
    "pattern groups": ({"type": "string", "pattern": "(" * 30000 + ")" * 30000}, "more than"),
    "name pattern groups": (
        {"type": "object", "patternProperties": {"(" * 101 + ")" * 101: INTEGER}},
        "more than 100 groups",
    ),
    "pattern class": ({"type": "string", "pattern": "[^]a]"}, "']' within a class"),
    "pattern no text": ({"type": "string", "pattern": 3}, "no string"),
    "multiple above": ({"type": "integer", "multipleOf": 5, "minimum": 1}, "with two"),
    "multiple in wide range": (
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 10_000},
        "at most 10000 numbers",
    ),
    "multiple in format": ({"type": "integer", "multipleOf": 5, "format": "int32"}, "at most 1"),
    "huge multiple": ({"type": "integer", "multipleOf": 1025}, "1 to 1024"),
    "integer format": ({"type": "integer", "format": "date"}, "not one of int8"),
    "number format": ({"type": "number", "format": "int32"}, "not one of float, double"),
    "number multiple": ({"type": "number", "multipleOf": 0.5}, "says nothing about type number"),
    "mixed multiple": ({"type": ["integer", "number"], "multipleOf": 2}, "for type integer"),
    "broken bound": ({"type": "integer", "minimum": 1.5}, "whole number"),
    "huge bound": ({"type": "number", "minimum": 1e20}, "10**15"),
    "huge integer bound": ({"type": "integer", "maximum": 2**63}, "2**63"),
    "old bound": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
    "bad count": ({"type": "string", "maxLength": -1}, "maxLength"),
    "crossed counts": ({"type": "array", "minItems": 3, "maxItems": 2}, "above"),
    "empty enum": ({"enum": []}, "no list of values"),
    "enum against type": ({"type": "string", "enum": ["a", 1]}, "type forbids"),
    "enum and length": ({"enum": ["a"], "minLength": 2}, "cannot be combined"),
    "enum too large a number": ({"enum": [2**60 + 1]}, "2**53"),
    "required elsewhere": ({"type": "object", "required": ["a"]}, "names that properties has"),
    "open with schema": (
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING},
        "cannot be combined",
    ),
    "patterns and names": (
        {"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^x": INTEGER}},
        "cannot be combined",
    ),
    "two patterns": (
        {"type": "object", "patternProperties": {"^x": INTEGER, "y$": STRING}},
        "one pattern",
    ),
    "least of any": ({"type": "object", "minProperties": 2}, "beside properties only"),
    "anyOf beside": ({"type": "object", "anyOf": [{"required": ["a"]}]}, "cannot be combined"),
    "allOf": ({"allOf": [INTEGER, {"minimum": 3}]}, "several schemas"),
    "oneOf overlap": ({"oneOf": [INTEGER, NUMBER]}, "no value can meet two"),
    "oneOf objects": ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "no value can meet"),
    "ref beside": ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}}, "combined"),
    "ref remote": ({"$ref": "https://example.com/a"}, "names no schema"),
    "ref missing": ({"$ref": "#/$defs/a"}, "names no schema"),
    "ref anchor": ({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "null"}}}, "anchor"),
    "ref to no schema": ({"$ref": "#/x-own", "x-own": INTEGER}, "names no schema"),
    "dynamicRef": ({"$dynamicRef": "#a"}, "dynamicRef"),
    "inner id": ({"type": "array", "items": {"$id": "b"}}, "$id"),
    "deep inside": (
        {"type": "array", "items": {"anyOf": [STRING, {"not": {}}]}},
        "#/items/anyOf/1",
    ),
}


@pytest.fixture(scope="module")
def compiler():
    return backend()


@pytest.mark.parametrize("name", SUPPORTED)
def test_random_answers_validate(compiler, name: str) -> None:
    schema = SUPPORTED[name]
    compiled = compiler.compile(form(json_schema=schema))
    spaced = compiler.compile(form(json_schema=schema, any_whitespace=True))
    ended = 0
    for seed in range(24):
        answer = walk(spaced if seed % 4 == 3 else compiled, seed)
        if answer is not None:
            ended += 1
            jsonschema.validate(json.loads(answer), schema)
            assert seed % 4 == 3 or b"\n" not in answer
    assert ended >= 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_passed_over_is_refused(name: str) -> None:
    schema, why = REFUSED[name]
    with pytest.raises(RequestError, match="JSON schema cannot be used") as caught:
        checked_schema(json.dumps(schema))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "Circular"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "Circular"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "greater than maximum"),
        ({"type": "array", "prefixItems": [INTEGER, STRING], "maxItems": 1}, "axItems is less"),
    ],
)
def test_what_nothing_can_meet_is_refused(compiler, schema: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        compiler.compile(form(json_schema=schema))


def test_bounds_and_formats_of_integers_are_exact(compiler) -> None:
    """z.int() of zod says the first, Option<u32> of Rust's schemars the second."""
    safe = compiler.compile(
        form(json_schema={"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1})
    )
    rust = {"type": ["integer", "null"], "format": "uint32", "minimum": 0}
    small = compiler.compile(form(json_schema=rust))
    for compiled, low, high in ((safe, 1 - 2**53, 2**53 - 1), (small, 0, 2**32 - 1)):
        assert [accepts(compiled, str(number)) for number in (low - 1, low, high, high + 1)] == [
            False,
            True,
            True,
            False,
        ]
    assert accepts(small, "null")
    assert checked_schema('{"type": "number", "format": "double"}') == '{"type": "number"}'


def test_addresses_have_no_leading_zeros(compiler) -> None:
    """Python's ipaddress, and so pydantic, takes none: some systems read them as octal."""
    compiled = compiler.compile(form(json_schema={"type": ["string", "null"], "format": "ipv4"}))
    answers = ['"10.0.255.1"', '"192.168.100.249"', "null"]
    others = ['"010.0.0.1"', '"1.2.3.00"', '"1.2.3.256"', '"1.2.3"', '"a"']
    assert [accepts(compiled, answer) for answer in answers] == [True] * len(answers)
    assert [accepts(compiled, other) for other in others] == [False] * len(others)


def nested(levels: int) -> Any:
    schema: Any = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(200),
        {"anyOf": [INTEGER] * 6_000},
        {"enum": list(range(20_000))},
        {
            "type": "object",
            "properties": {f"p{i}": INTEGER for i in range(100)},
            "minProperties": 50,
        },
    ],
    ids=["levels", "parts", "values", "counted properties"],
)
def test_size_is_bounded(schema: Any) -> None:
    with pytest.raises(RequestError, match=r"at most|more than"):
        checked_schema(json.dumps(schema))


def test_layout(compiler) -> None:
    one_line = compiler.compile(form(json_object=True))
    free = compiler.compile(form(json_object=True, any_whitespace=True))
    assert accepts(one_line, '{"a": [1, {"b": null}]}')
    assert not accepts(one_line, '{"a":\n1}')
    assert accepts(free, '{"a":\n1}')
    assert not accepts(one_line, "[]")
    assert not accepts(free, "1")
