"""The ways of asking for a form of the answer, on every route, and what they come to."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.base.errors import RequestError
from headrace.request.structured_output import StructuredOutput

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
        ],
    },
}
AS_SCHEMA = {"json_schema": SCHEMA}
NAMED_SCHEMA = {"name": "answer", "description": "d", "strict": True, "schema": SCHEMA}

PLAIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json_schema": SCHEMA}, AS_SCHEMA),
    ({"json_schema": TEXT}, AS_SCHEMA),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"structural_tag": json.dumps(OLD_TAG)}, {"structural_tag": NEW_TAG}),
    ({"structural_tag": TAG}, {"structural_tag": TAG}),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
]
FORMATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "json_object"}, {"json_object": True}),
    ({"type": "json_object", "schema": SCHEMA}, AS_SCHEMA),
    ({"type": "json_schema", "json_schema": NAMED_SCHEMA}, AS_SCHEMA),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}, {"json_schema": {}}),
    (TAG, {"structural_tag": TAG}),
    (OLD_TAG, {"structural_tag": NEW_TAG}),
]
VLLM: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json": SCHEMA}, AS_SCHEMA),
    ({"json": TEXT, "disable_fallback": True}, AS_SCHEMA),
    ({"json": TEXT, "disable_any_whitespace": True}, AS_SCHEMA),
    ({"json": TEXT, "disable_any_whitespace": False}, AS_SCHEMA | {"any_whitespace": True}),
    ({"regex": "a+", "disable_any_whitespace": False, "json": None}, {"regex": "a+"}),
    ({"json_object": True}, {"json_object": True}),
    ({"choice": ["a", "b"], "json_object": False}, {"choice": ["a", "b"]}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"structural_tag": json.dumps(TAG)}, {"structural_tag": TAG}),
]
FIELDS = [
    *PLAIN,
    *[({"response_format": asked}, made) for asked, made in FORMATS],
    *[({"structured_outputs": asked}, made) for asked, made in VLLM],
]
NOTHING: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"regex": "", "ebnf": None, "json_schema": ""},
]


def post(http: TestClient, route: str, **body: Any) -> Any:
    start = {"messages": HELLO} if "chat" in route else {"prompt": "a"}
    return http.post(route, json=start | body)


ROUTES = ("/v1/chat/completions", "/v1/completions")


@pytest.mark.parametrize(("asked", "made"), FIELDS, ids=range(len(FIELDS)))
def test_forms(http, engine, asked, made) -> None:
    for route in ROUTES:
        answer = post(http, route, **asked)
        assert answer.status_code == 200, answer.text
        assert engine.params.structured == StructuredOutput(**made)


@pytest.mark.parametrize("asked", NOTHING)
def test_no_form(http, engine, asked) -> None:
    for route in ROUTES:
        assert post(http, route, **asked).status_code == 200
        assert engine.params.structured is None


@pytest.mark.parametrize(("asked", "made"), PLAIN, ids=range(len(PLAIN)))
def test_forms_of_the_native_route(http, engine, asked, made) -> None:
    body = {"text": ["a", "b"], "sampling_params": [asked, {}]}
    assert http.post("/generate", json=body).status_code == 200
    with_form, without = engine.submits
    assert with_form.params.structured == StructuredOutput(**made)
    assert without.params.structured is None


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'. Allowed: text"),
        ({"response_format": {}}, "response_format", "None. Allowed: text"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "has no schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}},
            "response_format",
            "json_schema.name is 3",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}},
            "response_format",
            "strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format",
            "json_schema is [1]",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": 3}},
            "structural_tag",
            "list",
        ),
        ({"json_schema": "{"}, "json_schema", "no JSON"),
        ({"regex": 5}, "regex", "string"),
        ({"structural_tag": "[1]"}, "structural_tag", "[1]"),
        ({"structured_outputs": {}}, "structured_outputs", "has no form"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "'xml' is 'a'"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs",
            "not supported",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs.json",
            "structured_outputs.regex and structured_outputs.json ask for different forms",
        ),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf ask for different forms"),
        (
            {"regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "different forms",
        ),
    ],
)
def test_forms_that_cannot_be(http, asked, param: str, told: str) -> None:
    for route in ROUTES:
        answer = post(http, route, **asked)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert told in answer.json()["error"]["message"]


def test_native_forms_that_cannot_be(http) -> None:
    for asked, told in (
        ({"regex": "a", "ebnf": "b"}, "different forms"),
        ({"json_schema": "{"}, "no JSON"),
        ({"structured": {"regex": "a"}}, "not known"),
        ({"temprature": 0}, "not known (did you mean temperature?)"),
    ):
        answer = http.post("/generate", json={"text": "a", "sampling_params": asked})
        assert answer.status_code == 400, answer.text
        assert told in answer.json()["error"]["message"]


def test_the_engine_refuses_before_a_stream_begins(http, engine) -> None:
    engine.refuse = lambda submit: RequestError("The regex of structured is not a grammar")
    for stream in (False, True):
        answer = post(http, ROUTES[0], regex="(", stream=stream)
        assert answer.status_code == 400
        assert "not a grammar" in answer.json()["error"]["message"]
