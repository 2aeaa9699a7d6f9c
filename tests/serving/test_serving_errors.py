"""No body makes a 422 or a 500, and every error has one shape and a bounded message."""

import asyncio
import json
import time

import pytest
from asgi import Exchange
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from headrace.serving.app import make_app
from headrace.serving.body_route import check_parts
from headrace.serving.errors import LONGEST_MESSAGE, ApiError
from headrace.serving.native.generate_request import GenerateRequest
from headrace.serving.openai.chat_request import ChatRequest, Message
from headrace.serving.openai.completion_request import CompletionRequest
from headrace.serving.openai.embedding_request import EmbeddingRequest
from headrace.serving.other_paths import PATH_WORDS
from headrace.serving.routes.tokenize import DetokenizeRequest, TokenizeRequest

ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "text": b'"text"',
    "number": b"5",
    "null": b"null",
    "list": b"[]",
    "empty": b"{}",
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000,
    "deep field": b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    "huge integer": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "large integer": b'{"prompt": [9999999999999999999999], "tokens": [9999999999999999999999]}',
    "NaN": b'{"prompt": "a", "text": "a", "temperature": NaN, "sampling_params": {"top_p": NaN}}',
    "infinity": b'{"prompt": "a", "temperature": Infinity, "tokens": [Infinity]}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": rb'{"prompt": "\ud800", "text": "\ud800", "model": "\udfff"}',
    "lone surrogate in messages": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "surrogate names": rb'{"\ud800": 1, "prompt": 5}',
    "wrong types": json.dumps(
        {name: {"a": [1]} for name in ("prompt", "messages", "n", "stop", "text", "tokens")}
    ).encode(),
    "true for numbers": b'{"prompt": "a", "n": true, "max_tokens": true, "tokens": [true]}',
    "texts for numbers": b'{"prompt": "a", "temperature": "0.5"}',
    "many faults": json.dumps(
        {"messages": [{}] * 3000, "stop": [1] * 3000, "prompt": [[]] * 3000, "n": "x"}
    ).encode(),
    "long value": json.dumps({"prompt": 5, "model": "x" * 100_000, "n": "y" * 100_000}).encode(),
    "null byte": b'{"prompt": "\\u0000", "n": "\\u0000"}',
    "mixed prompts": b'{"prompt": [1, "a", [2]], "text": [1], "tokens": [[1], 2]}',
    "negative ids": b'{"prompt": [-1], "input_ids": [-1], "tokens": [-1]}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "duplicate keys": b'{"prompt": "a", "n": 0, "n": 0}',
}


def check_shape(answer) -> dict:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(body["error"]["message"]) <= LONGEST_MESSAGE
    assert len(answer.content) < 2000
    return body["error"]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("route", ROUTES)
def test_bad_bodies(http: TestClient, route, name) -> None:
    answer = http.post(route, content=BODIES[name], headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        check_shape(answer)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_most_bad_bodies_are_refused(http: TestClient, route) -> None:
    headers = {"content-type": "application/json"}
    for name in ("no JSON", "text", "list", "deep", "huge integer", "not UTF-8", "wrong types"):
        assert http.post(route, content=BODIES[name], headers=headers).status_code == 400, name


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [-1, 1e9, "x", [1]],
        "top_p": [0, -0.1, 1.1],
        "top_k": [-2, 1.5, 2**40],
        "min_p": [-1, 2],
        "n": [0, -1, 5000],
        "max_tokens": [0, -1, 2**40, 1.5],
        "min_tokens": [-1],
        "presence_penalty": [3],
        "frequency_penalty": [-3],
        "repetition_penalty": [0, -1],
        "logit_bias": [{"a": 1}, {"-1": 1}, {"1_0": 1}, {"5": "x"}, [1], {"5": 1e30}],
        "seed": [2**70, 1.5, "x"],
        "stop": [[""], [1], {}, ""],
        "stop_token_ids": [[-1], ["a"], [2**40], list(range(100))],
        "logprobs": [-1, 21, "x"],
        "prompt_logprobs": [-1, 21],
        "best_of": [0, 1000],
        "stream": ["yes", 1],
        "stream_options": [{}, []],
        "allowed_token_ids": [[]],
        "bad_words": [[""]],
        "logprobs_mode": ["odd"],
        "suffix": ["x"],
        "regex": [5],
        "lora_path": ["x"],
        "priority": [2**40],
        "cache_salt": ["x" * 300],
        "rid": ["", "x" * 200, "x\ny", "x\x1b[2J"],
        "prompt": ["", [], [[]], [["a"]], {}, 5, None, [1.5], [True]],
    }.items(),
)
def test_values_out_of_range_are_named(http: TestClient, engine, field, values) -> None:
    for value in values:
        if field == "prompt" and value == "":
            continue  # what a tokenizer makes of it is the engine's to judge
        body = {"prompt": "a", field: value}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400, (value, answer.text)
        error = check_shape(answer)
        assert field in error["message"], (value, error)
        assert error["param"] is None or error["param"].startswith(field)
    assert not engine.submits


def test_fields_of_chats_are_not_those_of_completions(http: TestClient, engine) -> None:
    for field, told in (
        ({"max_completion_tokens": 5}, "use max_tokens"),
        ({"top_logprobs": 5}, "use logprobs"),
        ({"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions has it"),
        ({"chat_template_kwargs": {"a": 1}}, "/v1/chat/completions has it"),
    ):
        error = check_shape(http.post("/v1/completions", json={"prompt": "a", **field}))
        assert told in error["message"]
    assert not engine.submits


def test_a_fault_is_told_of_the_field_not_of_the_types_that_were_tried(http: TestClient) -> None:
    for route, body, field in (
        ("/v1/completions", {"prompt": "a", "stop": 5}, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": ["a", None]}, "stop"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ["Hi"]}]}, "content"),
    ):
        error = check_shape(http.post(route, json=body))
        assert error["param"].endswith(field)
        assert "[" not in error["message"].partition(": ")[0]


def test_another_content_type_is_415(http: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = http.post("/v1/completions", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415, kind
        check_shape(answer)
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post("/v1/completions", content=b"\x1f\x8b", headers=packed)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert "'gzip'" in check_shape(answer)["message"]
    kind = {"content-type": "application/json; charset=utf-8"}
    body = b'{"prompt": "a"}'
    assert http.post("/v1/completions", content=body, headers=kind).status_code == 200


def test_large_bodies_are_413(make_service) -> None:
    with TestClient(make_app(make_service(max_body_bytes=2000))) as http:
        large = {"prompt": "a" * 3000}
        assert http.post("/v1/completions", json={"prompt": "a" * 200}).status_code == 200
        answer = http.post("/v1/completions", json=large)
        assert answer.status_code == 413
        check_shape(answer)
        pieces = iter([b'{"prompt": "', b"a" * 3000, b'"}'])  # without a length in advance
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/completions", content=pieces, headers=headers)
        assert answer.status_code == 413
        check_shape(answer)


@pytest.mark.parametrize(
    "many",
    [b"1,", b'"a",', b"[],", b"{},", b'"a":1,'],
    ids=["ids", "texts", "lists", "objects", "keys"],
)
def test_bodies_of_very_many_parts_are_413(http: TestClient, many: bytes) -> None:
    """Making objects of them holds up everybody else, for seconds."""
    body = b'{"prompt": [' + many * 1_200_000
    headers = {"content-type": "application/json"}
    began = time.process_time()
    for route in ROUTES:
        answer = http.post(route, content=body, headers=headers)
        assert answer.status_code == 413
        assert check_shape(answer)["code"] == "too_many_parts"
    assert time.process_time() - began < 5


PROSE = "This is prose (of a chapter or two), where a bracket [1] or a colon: here, is seldom. "


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "temperature": 0, "prompt": [' + b"99999," * (2**20 - 1) + b"5]}",
        json.dumps({"prompt": PROSE * 130_000}).encode(),
    ],
    ids=["a million ids", "prose"],
)
def test_large_bodies_of_what_people_send_are_read(body: bytes) -> None:
    check_parts(body, 2**24)


def test_a_body_that_breaks_off_is_nobodys_error(service) -> None:
    exchange = Exchange(make_app(service), "/v1/completions", {})

    async def broken() -> dict:
        return {"type": "http.disconnect"}

    exchange._receive = broken  # type: ignore[method-assign]
    asyncio.run(exchange.run())
    assert exchange.status == 400


def test_paths_of_others_lead_to_ours(http: TestClient) -> None:
    paths = http.app.openapi()["paths"]  # type: ignore[attr-defined]
    assert set(PATH_WORDS.renamed.values()) <= paths.keys()
    assert not paths.keys() & {*PATH_WORDS.renamed, *PATH_WORDS.advice}


def test_unknown_paths_methods_and_models(http: TestClient) -> None:
    for asked, told in (
        ("/nosuch", "/docs lists what there is"),
        ("/v1/", "/docs lists what there is"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/completions/", "did you mean /v1/completions?"),
        ("/completion", "did you mean /v1/completions?"),
        ("/reset_prefix_cache", "use /flush_cache"),
        ("/api/generate", "use /v1/completions"),
        ("/v1/load_lora_adapter", "this version does not have it"),
        ("/v1/v1/embeddings", "did you mean /v1/embeddings?"),
        ("/v1/chat/completions/chat/completions", "did you mean /v1/chat/completions?"),
    ):
        error = check_shape(http.post(asked, json={}))
        assert error["code"] == "no_such_path"
        assert error["message"] == f"There is no POST {asked}; {told}"
    answer = http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    check_shape(answer)
    assert http.delete("/generate").headers["allow"] == "POST, PUT"
    for answer in (
        http.post("/v1/completions", json={"prompt": "a", "model": "other"}),
        http.get("/v1/models/other/one"),
    ):
        assert answer.status_code == 404
        assert check_shape(answer)["code"] == "model_not_found"


def test_the_models_name_is_not_read_when_so_asked(make_service) -> None:
    with TestClient(make_app(make_service(check_model_name=False))) as http:
        reply = http.post("/v1/completions", json={"prompt": "a", "model": "other"}).json()
        assert reply["model"] == "other"


def test_a_bug_is_a_500_of_the_same_shape_that_tells_nothing(http, engine) -> None:
    engine.refuse = lambda submit: 1 / 0  # type: ignore[return-value]
    answer = http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert check_shape(answer)["message"] == "The server failed; its log says why"


def test_messages_are_bounded_and_can_be_encoded() -> None:
    error = ApiError(400, "x" * 5000 + "\ud800", param="\ud800" * 500)
    assert len(error.body.error.message) == LONGEST_MESSAGE
    assert len(error.encoded()) < 2000


MODELS = (
    *(ChatRequest, Message, CompletionRequest, EmbeddingRequest),
    *(GenerateRequest, TokenizeRequest, DetokenizeRequest),
)


@pytest.mark.parametrize("model", MODELS)
def test_of_many_faults_the_first_is_told(model: type[BaseModel]) -> None:
    """Millions of faults, as a large body can have, would take minutes and gigabytes."""
    wrong = object()
    many = ([wrong] * 500, [[wrong] * 500] * 500, {str(each): wrong for each in range(500)})
    counts = []
    for name in model.model_fields:
        for value in many:
            try:
                model.model_validate({"prompt": "a", "input": "a"} | {name: value})
            except ValidationError as error:
                counts.append(error.error_count())
    assert len(counts) > 2
    assert max(counts) < 10


@pytest.mark.parametrize("prompt", [[5] * 1025, "a" * 30_000])
def test_a_prompt_that_cannot_fit_is_not_sent_to_the_engine(http, engine, prompt) -> None:
    """Nor is a text read through that is longer than the context in the longest tokens. LiteLLM
    knows the fault by its words."""
    for route, body in (
        ("/v1/completions", {"prompt": prompt}),
        ("/v1/embeddings", {"input": ["a", prompt] if isinstance(prompt, str) else prompt}),
        ("/generate", {"text" if isinstance(prompt, str) else "input_ids": prompt}),
    ):
        answer = http.post(route, json=body)
        assert answer.status_code == 400
        error = check_shape(answer)
        assert error["code"] == "context_length_exceeded"
        assert "his model's maximum context length is 1024 tokens" in error["message"]
        assert ("30000 characters" if isinstance(prompt, str) else "1025 tokens") in error[
            "message"
        ]
    assert not engine.submits


def test_texts_of_one_request_are_counted(http) -> None:
    for route, body in (
        ("/tokenize", {"prompt": ["a"] * 1025}),
        ("/detokenize", {"tokens": [[1]] * 1025}),
    ):
        answer = http.post(route, json=body)
        assert answer.status_code == 400
        assert "1025 parts" in check_shape(answer)["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_sends_too_much_can_read_the_refusal(make_service, announced: bool) -> None:
    """Its body is read to the end and dropped: closing on it would break its connection."""
    asked = []

    async def receive() -> dict:
        asked.append(None)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": len(asked) < 50}

    sent = []

    async def send(message: dict) -> None:
        sent.append((len(asked), message))

    length = [(b"content-length", b"50000")] if announced else [(b"transfer-encoding", b"chunked")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *length],
    }
    asyncio.run(make_app(make_service(max_body_bytes=2000))(scope, receive, send))
    assert sent[0][1]["status"] == 413
    assert sent[0][0] >= 50
