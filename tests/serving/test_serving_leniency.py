"""--no-refuse-unsupported: what cannot be honoured has no effect; the rest does."""

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from headrace.request.outcome import Finished
from headrace.serving.app import make_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def lenient(make_service) -> Iterator[TestClient]:
    app = make_app(make_service(refuse_unsupported=False, tool_call_parser="hermes"))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize(
    ("route", "field"),
    [
        (COMPLETIONS, {"suffix": "x"}),
        (COMPLETIONS, {"best_of": 0}),
        (COMPLETIONS, {"max_tokens": 0}),
        (COMPLETIONS, {"logit_bias": {"foo": 0}}),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}),
        (CHAT, {"max_completion_tokens": 0}),
        (CHAT, {"verbosity": "low"}),
        (CHAT, {"tools": []}),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        (CHAT, {"audio": {"format": "wav", "voice": "alloy"}}),
    ],
)
def test_refused_by_default_and_left_out_when_asked(
    lenient: TestClient, http: TestClient, engine: FakeEngine, caplog, route, field
) -> None:
    body = {"messages": MESSAGES} if route == CHAT else {"prompt": "Hel"}
    assert http.post(route, json=body | field).status_code == 400
    assert not engine.submits
    (name,) = field
    for _ in range(2):
        answer = lenient.post(route, json=body | field | {"temperature": 0.5})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == name
    assert engine.params.temperature == 0.5
    told = [each for each in caplog.records if f"the field '{name}', which" in each.message]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}),
        ("/v1/messages", {"n": 2}),
        ("/v1/responses", {"stop": "x"}),
        ("/v1/responses", {"audio": {"format": "wav"}}),
        ("/v1/responses", {"text": {"verbosity": "low"}}),
    ],
)
def test_the_other_forms_of_a_chat_leave_out_the_same(
    lenient: TestClient, http: TestClient, engine: FakeEngine, route, field
) -> None:
    form = {"input": "Hello"} if route == "/v1/responses" else {"messages": MESSAGES}
    body = {**form, "max_tokens": 9} if route == "/v1/messages" else form
    refusal = http.post(route, json=body | field)
    assert refusal.status_code == 400
    assert "is not supported" in refusal.json()["error"]["message"]
    assert not engine.submits
    answer = lenient.post(route, json=body | field | {"temperature": 0.5})
    assert answer.status_code == 200, answer.text
    assert next(iter(field)) in answer.headers["x-ignored-fields"]
    assert (engine.params.temperature, engine.params.n, engine.params.stop) == (0.5, 1, ())


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
def test_tools_that_are_no_functions_are_left_out(
    lenient: TestClient, http: TestClient, engine: FakeEngine, route: str
) -> None:
    """Agents send every model the tools that OpenAI and Anthropic run themselves."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    ours = {"name": "f", "parameters": schema, "input_schema": schema}
    if route == "/v1/responses":
        form, choice = {"input": "Hello"}, "auto"
        ours["type"] = "function"
    else:
        form, choice = {"messages": MESSAGES, "max_tokens": 9}, {"type": "auto"}
    theirs = {"type": "web_search", "name": "web_search"}
    for tools in ([theirs], [theirs, ours]):
        body = {**form, "tools": tools, "tool_choice": choice}
        assert "web_search" in http.post(route, json=body).json()["error"]["message"]
        answer = lenient.post(route, json=body)
        assert answer.status_code == 200, answer.text
    if route == "/v1/messages":
        count = lenient.post("/v1/messages/count_tokens", json={**form, "tools": [theirs]}).json()
        assert count == lenient.post("/v1/messages/count_tokens", json=form).json()


@pytest.mark.parametrize("route", ["/tokenize", "/v1/messages/count_tokens"])
def test_tokens_are_those_of_what_runs(make_service, reasoner, route: str) -> None:
    service = make_service(refuse_unsupported=False)
    service.tokenizer = reasoner  # whose template shows tools
    theirs, ours = (
        {"type": "web_search", "name": "g"},
        {"type": "function", "function": {"name": "f"}},
    )
    if route != "/tokenize":
        ours = {"name": "f", "input_schema": {"type": "object"}}
    with TestClient(make_app(service), raise_server_exceptions=False) as http:
        counts = [
            http.post(route, json={"messages": MESSAGES, "tools": tools}).json()
            for tools in ([], [theirs], [ours], [ours, theirs])
        ]
    assert counts[0] == counts[1] != counts[2] == counts[3]


def test_a_message_of_one_token_ends_by_that(lenient: TestClient, engine: FakeEngine) -> None:
    engine.finished = Finished("length")
    body = {"messages": MESSAGES, "max_tokens": 0}
    assert lenient.post("/v1/messages", json=body).json()["stop_reason"] == "max_tokens"


def test_what_can_be_honoured_still_is(lenient: TestClient, engine: FakeEngine) -> None:
    body = {"prompt": "Hel", "suffix": "x", "logit_bias": {"5": 2, "foo": 1}, "max_tokens": 0}
    lenient.post(COMPLETIONS, json=body)
    assert engine.params.logit_bias == {5: 2.0}
    assert engine.params.max_tokens == 1
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert '"usage"' in lenient.post(COMPLETIONS, json={"prompt": "Hel", **options}).text


def test_echo_with_no_tokens_shows_the_prompt_alone(lenient: TestClient) -> None:
    body = {"prompt": "Hel", "max_tokens": 0, "echo": True}
    assert lenient.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "Hel"


@pytest.mark.parametrize("field", [{"temperature": -1}, {"n": 0}, {"best_of": 1000}])
def test_values_out_of_range_are_refused_all_the_same(lenient: TestClient, field) -> None:
    assert lenient.post(COMPLETIONS, json={"prompt": "Hel"} | field).status_code == 400
