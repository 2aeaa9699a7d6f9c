"""/v1/messages: what Anthropic's clients send becomes a chat, and its answer their blocks."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from headrace.base.errors import EngineDeadError
from headrace.config.engine_config import EngineConfig
from headrace.request.outcome import Finished
from headrace.serving.app import make_app
from headrace.serving.server_config import ServerConfig
from headrace.serving.service import Service
from headrace.text.tokenizer import Tokenizer

ROUTE = "/v1/messages"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def http(engine: FakeEngine, reasoner: Tokenizer) -> Iterator[TestClient]:
    config = ServerConfig(api_key="right")
    service = Service(
        config=config, asked=EngineConfig(model="tiny"), engine=engine, tokenizer=reasoner
    )
    headers = {"x-api-key": "right", "anthropic-version": "2023-06-01"}
    with TestClient(make_app(service), headers=headers, raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def says(engine: FakeEngine) -> Callable[..., None]:
    def say(*words: str, ending: Finished | None = None) -> None:
        engine.words, engine.finished = list(words), ending or Finished("stop")

    return say


def test_an_agent_that_asks_for_more_than_the_context_gets_what_there_is(
    http, engine, says
) -> None:
    """Agents ask for 32,000 tokens whatever the model; each of their requests was refused."""
    room = (
        engine.info.max_model_len
        - http.post(f"{ROUTE}/count_tokens", json={"messages": HELLO}).json()["input_tokens"]
    )
    says("Hel", "lo", ending=Finished("length"))
    assert message(http, max_tokens=32_000)["stop_reason"] == "model_context_window_exceeded"
    assert engine.params.max_tokens == room
    assert events(http, max_tokens=room)[-2]["delta"]["stop_reason"] == "max_tokens"
    assert engine.params.max_tokens == room


def message(http: TestClient, **fields: Any) -> dict[str, Any]:
    answer = http.post(ROUTE, json={"max_tokens": 100, "messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post(ROUTE, json={"max_tokens": 100, "messages": HELLO, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    told = []
    for part in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to, as Anthropic's client adds."""
    first, *rest = told
    made = first["message"]
    assert made["content"] == []
    written: dict[int, str] = {}
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(made["content"])
                made["content"].append(event["content_block"])
                written[event["index"]] = ""
            case "content_block_delta":
                (text,) = [each for name, each in event["delta"].items() if name != "type"]
                written[event["index"]] += text
            case "content_block_stop":
                block, text = made["content"][event["index"]], written.pop(event["index"])
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text or "{}")
                else:
                    block[block["type"]] = text
            case "message_delta":
                made |= event["delta"]
                made["usage"] |= event["usage"]
    assert not written
    assert told[-1] == {"type": "message_stop"}
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_the_blocks_of_its_answer(http, says, stream: bool) -> None:
    says("<think>", "Well", "</think>\n\n", "Hello", " you", "\n", CALL)
    fields = {"tools": [WEATHER], "system": [{"type": "text", "text": "Be kind"}]}
    made = joined(events(http, **fields)) if stream else message(http, **fields)
    thinking, text, call = made["content"]
    assert thinking == {"type": "thinking", "thinking": "Well", "signature": ""}
    assert text["type"] == "text"
    assert text["text"].rstrip() == "Hello you"
    assert call["id"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "tiny")
    assert made["id"].startswith("msg_")
    assert (made["stop_reason"], made["stop_sequence"]) == ("tool_use", None)
    usage = made["usage"]
    assert usage["output_tokens"] > 10
    assert usage["cache_read_input_tokens"] == 1
    assert usage["input_tokens"] > 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ending", "reason", "stop"),
    [
        (Finished("stop"), "end_turn", None),
        (Finished("stop", stop_reason="END"), "stop_sequence", "END"),
        (Finished("length"), "max_tokens", None),
        (Finished("abort"), "pause_turn", None),
    ],
)
def test_how_it_ended(http, says, stream: bool, ending, reason: str, stop: str | None) -> None:
    says("a", "b", ending=ending)
    asked = {"stop_sequences": ["END"]}
    made = joined(events(http, **asked)) if stream else message(http, **asked)
    assert made["content"] == [{"type": "text", "text": "ab"}]
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, stop)


def test_options_are_those_of_a_chat(http, engine) -> None:
    message(http, temperature=0.25, top_p=0.5, top_k=9, stop_sequences=["x"], max_tokens=7)
    params = engine.params
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 9)
    assert (params.stop, params.max_tokens) == (("x",), 7)
    assert params.structured is None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    message(http, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert engine.params.structured is not None


def test_tokens_of_a_whole_request_can_be_counted(http) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0.5, "stream": True}
    assert http.post(f"{ROUTE}/count_tokens", json=body).status_code == 200


def test_a_conversation_with_tools_becomes_the_models_prompt(http, engine) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look", "signature": "s"},
                {"type": "text", "text": "Wait"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    message(http, messages=turns, tools=[WEATHER], system="Be kind")
    prompt = engine.submits[-1].prompt_text
    said = ("Be kind", "Weather?", "<think>Look</think>Wait", '"Oslo"', "<tool>rain", "And now?")
    for part in said:
        prompt = prompt[prompt.index(part) :]


@pytest.mark.parametrize("text", ["{", [{"type": "text", "text": "{"}]])
def test_an_answer_goes_on_from_what_the_assistant_began(http, engine, text) -> None:
    begun = [*HELLO, {"role": "assistant", "content": text}]
    message(http, messages=begun)
    prompt = engine.submits[-1].prompt_text
    assert prompt.endswith("{")
    count = http.post(f"{ROUTE}/count_tokens", json={"messages": begun}).json()["input_tokens"]
    assert count == len(engine.submits[-1].prompt_token_ids)
    message(http, messages=[*HELLO, {"role": "assistant", "content": ""}])
    assert engine.submits[-1].prompt_text.endswith("<assistant>")


def test_what_coding_agents_send(http, engine) -> None:
    """An empty list of tools, and word from the system in the middle of the talk."""
    turns = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "Agents: none"}]}]
    message(http, messages=turns, tools=[])
    assert "<system>Agents: none" in engine.submits[-1].prompt_text


@pytest.mark.parametrize(
    ("choice", "must"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "auto"}, False),
    ],
)
def test_choice_of_tools(http, engine, says, choice, must: bool) -> None:
    says(CALL)
    message(http, tools=[WEATHER], tool_choice=choice)
    assert (engine.params.structured is not None) == must


def test_thinking_is_switched_by_the_template(http, engine) -> None:
    closed = "<think>\n\n</think>"
    message(http, thinking={"type": "disabled"})
    assert engine.submits[-1].prompt_text.rstrip().endswith(closed)
    message(http, thinking={"type": "enabled", "budget_tokens": 1024})
    assert not engine.submits[-1].prompt_text.rstrip().endswith(closed)


def test_tokens_are_counted_as_a_message_counts_them(http, says) -> None:
    fields = {"messages": HELLO, "system": "Be kind", "tools": [WEATHER]}
    counted = http.post(f"{ROUTE}/count_tokens", json=fields).json()
    usage = message(http, **fields)["usage"]
    asked = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": asked}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_sequences": [""]}, "stop_sequences is ['']"),
        ({"n": 2}, "/v1/chat/completions has it"),
        ({"mcp_servers": [{"type": "url"}]}, "tools are called by the client"),
        ({"output_config": {"format": {"type": "odd"}}}, "odd"),
        ({"output_config": {"format": 5}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "Allowed: user, assistant, system"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text blocks"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
            "holds 5",
        ),
        ({"system": [{"type": "document"}]}, "system holds"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"tool_choice": {"type": []}}, "tool_choice.type is []"),
        ({"thinking": {"type": "deep"}}, "thinking.type is 'deep'"),
        ({"thinking": {}}, "thinking.type is None"),
        ({"temperature": "hot"}, "temperature"),
        ({"lora_path": "x"}, "lora_path"),
    ],
)
def test_what_has_no_meaning_here_is_refused(http, engine, fields, told: str) -> None:
    answer = http.post(ROUTE, json={"max_tokens": 9, "messages": HELLO, **fields})
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert not engine.submits


def test_a_stream_that_fails_ends_with_an_error(http, engine) -> None:
    for after, kind in (("die_after", "overloaded_error"), ("fail_after", "api_error")):
        engine.die_after = engine.fail_after = -1
        setattr(engine, after, 1)
        last = events(http)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", kind)
        assert last["error"]["message"]
    engine.refuse = lambda submit: EngineDeadError("The engine is dead")
    assert http.post(ROUTE, json={"max_tokens": 9, "messages": HELLO}).status_code == 503


def test_the_key_may_come_in_anthropics_header(http) -> None:
    body = {"max_tokens": 9, "messages": HELLO}
    assert http.post(ROUTE, json=body, headers={"x-api-key": "wrong"}).status_code == 401
    assert http.post(ROUTE, json=body).status_code == 200
