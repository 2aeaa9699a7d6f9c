"""What form an answer must have: exactly one, of the right type and size."""

from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.request.structured_output import MAX_CHOICES, MAX_TEXT_BYTES, StructuredOutput

CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]

BAD: list[dict[str, Any]] = [
    {},
    {"regex": "a", "grammar": "b"},
    {"json_object": True, "json_schema": {}},
    {"json_object": 1},
    {"json_object": None},
    {"any_whitespace": "yes", "json_object": True},
    {"any_whitespace": True, "regex": "a"},
    {"special_tokens": ["<s>"], "regex": "a"},
    *[{"special_tokens": value, "structural_tag": {}} for value in ("<s>", [""], [3], None, 5)],
    *[{"json_schema": value} for value in ("", "{", "[1]", "3", [1], 3, {1, 2}, {"a": {1}})],
    *[{"json_schema": value} for value in ('{"a": NaN}', {"a": float("nan")}, CYCLE, {"a": DEEP})],
    {"json_schema": "[" * 100_000},
    {"json_schema": '{"a": "\\ud800"}'},
    {"json_schema": {"a": "\ud800"}},
    {"json_schema": {"a": "x" * MAX_TEXT_BYTES}},
    *[{"regex": value} for value in ("", 3, b"a", ["a"], "a\0", "\ud800", "é" * MAX_TEXT_BYTES)],
    *[{"grammar": value} for value in ("", 3, {})],
    *[{"choice": value} for value in ("abc", [], [""], ["a", 3], {"a": 1}, 5)],
    {"choice": [str(i) for i in range(MAX_CHOICES + 1)]},
    {"choice": ["x" * (MAX_TEXT_BYTES // 2), "y" * (MAX_TEXT_BYTES // 2)]},
    *[{"structural_tag": value} for value in ("", "[]", "true", True, [])],
]


@pytest.mark.parametrize("options", BAD, ids=range(len(BAD)))
def test_bad_forms_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutput(**options)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"json_schema": {"b": 1, "a": "é"}}, "json_schema", '{"b": 1, "a": "é"}'),
        ({"json_schema": ' {"b":1}'}, "json_schema", '{"b": 1}'),
        ({"json_schema": True}, "json_schema", "true"),
        ({"json_schema": False}, "json_schema", "false"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "root ::= 'a'"}, "grammar", "root ::= 'a'"),
        ({"choice": ["b", "a", "b"]}, "choice", '["b", "a"]'),
        ({"structural_tag": {"a": 1}}, "structural_tag", '{"a": 1}'),
    ],
)
def test_kind_and_text(options: dict[str, Any], kind: str, text: str) -> None:
    form = StructuredOutput(**options)
    assert (form.kind, form.text) == (kind, text)
    again = StructuredOutput(**{kind: getattr(form, kind)})
    assert again == form
    assert hash(again) == hash(form)


def test_a_schema_is_the_callers_no_more() -> None:
    schema = {"type": "integer"}
    form = StructuredOutput(json_schema=schema)
    schema["type"] = "string"
    assert form.text == '{"type": "integer"}'
