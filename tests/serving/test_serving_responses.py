"""/v1/responses: an input becomes a chat, its answer items, as openai-python's types have them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from headrace.config.engine_config import EngineConfig
from headrace.request.outcome import Finished
from headrace.serving.app import make_app
from headrace.serving.server_config import ServerConfig
from headrace.serving.service import Service
from headrace.text.tokenizer import Tokenizer

ROUTE = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def http(engine: FakeEngine, reasoner: Tokenizer) -> Iterator[TestClient]:
    service = Service(
        config=ServerConfig(), asked=EngineConfig(model="tiny"), engine=engine, tokenizer=reasoner
    )
    with TestClient(make_app(service), raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def says(engine: FakeEngine) -> Callable[..., None]:
    def say(*words: str, ending: Finished | None = None) -> None:
        engine.words, engine.finished = list(words), ending or Finished("stop")

    return say


def response(http: TestClient, **fields: Any) -> Response:
    answer = http.post(ROUTE, json={"input": "Hello", **fields})
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json())


def events(http: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """Each is of a type that openai-python knows, and they are numbered from 0."""
    answer = http.post(ROUTE, json={"input": "Hello", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    told = []
    for part in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
        EVENT.validate_python(told[-1])
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def test_an_answer_is_items_of_output(http, says) -> None:
    says("<think>", "Well", "</think>\n\n", "Hello", " you", "\n", CALL)
    made = response(http, tools=[WEATHER], instructions="Be kind", metadata={"a": "b"})
    thought, said, call = made.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Well")
    assert (said.type, said.role, said.status) == ("message", "assistant", "completed")
    assert made.output_text.rstrip() == "Hello you"
    assert (call.type, call.name, json.loads(call.arguments)) == (
        *("function_call", "weather"),
        {"city": "Oslo"},
    )
    assert call.call_id
    assert len({item.id for item in made.output}) == 3
    assert (made.status, made.error, made.incomplete_details) == ("completed", None, None)
    assert (made.instructions, made.metadata) == ("Be kind", {"a": "b"})
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.usage.input_tokens_details.cached_tokens == 1


def test_a_stream_adds_up_to_the_whole(http, says) -> None:
    says("<think>", "We", "ll", "</think>\n\n", "Hello", " you", "\n", CALL)
    whole = response(http, tools=[WEATHER])
    told = events(http, tools=[WEATHER])
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == "response.completed"
    last = Response.model_validate(told[-1]["response"])
    assert last.usage == whole.usage
    plain = [item.model_dump(exclude={"id", "call_id"}) for item in whole.output]
    assert [item.model_dump(exclude={"id", "call_id"}) for item in last.output] == plain
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == told[-1]["response"]["output"]
    for place, item in enumerate(done):
        own = [event for event in told if event.get("output_index") == place]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["id"] == item["id"]
        pieces = "".join(each["delta"] for each in own if each["type"].endswith(".delta"))
        content = (
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        )
        assert pieces == content
        assert {each["item_id"] for each in own if "item_id" in each} == {item["id"]}


@pytest.mark.parametrize(
    ("ending", "status", "why"),
    [
        (Finished("stop"), "completed", None),
        (Finished("length"), "incomplete", "max_output_tokens"),
        (Finished("abort"), "incomplete", "aborted"),
    ],
)
def test_how_it_ended(http, says, ending, status: str, why: str | None) -> None:
    says("a", "b", ending=ending)
    answer = http.post(ROUTE, json={"input": "Hello"}).json()
    assert answer["status"] == status
    assert answer["incomplete_details"] == (None if why is None else {"reason": why})
    assert [item["status"] for item in answer["output"]] == [status]
    stream = http.post(ROUTE, json={"input": "Hello", "stream": True}).text
    told = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    assert told[-1]["type"] == f"response.{status}"
    (done,) = (each for each in told if each["type"] == "response.output_item.done")
    (item,) = told[-1]["response"]["output"]
    assert done["item"] == item
    assert item["status"] == status


def test_nothing_is_stored_and_the_answer_says_so(http) -> None:
    assert http.post(ROUTE, json={"input": "a", "store": True}).json()["store"] is False
    assert http.get(f"{ROUTE}/resp_1").status_code == 404


def test_options_are_those_of_a_chat(http, engine) -> None:
    made = response(http, temperature=0.25, top_p=0.5, max_output_tokens=7)
    params = engine.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.25, 0.5, 7)
    assert (made.temperature, made.top_p, made.max_output_tokens) == (0.25, 0.5, 7)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "form", "schema": schema, "strict": True}
    response(http, text={"format": form})
    assert engine.params.structured is not None
    response(http, text={"format": {"type": "text"}})
    assert engine.params.structured is None
    response(http, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert engine.params.structured is not None
    response(http, reasoning={"effort": "none"})
    assert engine.submits[-1].prompt_text.rstrip().endswith("</think>")


def test_items_become_the_models_prompt(http, engine) -> None:
    items = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "Look"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Wait", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather",
         "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather",
         "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": "sun"},
    ]  # fmt: skip
    response(http, input=items, tools=[WEATHER])
    prompt = engine.submits[-1].prompt_text
    assert prompt.count("<assistant>") == 2  # one turn with everything, and the one to come
    said = ("Be kind", "Weather?", "<think>Look</think>Wait", "Oslo", "Bonn", "rain", "sun")
    for part in said:
        prompt = prompt[prompt.index(part) :]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is stored"),
        ({"conversation": "c"}, "nothing is stored"),
        ({"background": True}, "nothing is stored"),
        ({"truncation": "auto"}, "never truncated"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"input": []}, "input is empty"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"role": "judge", "content": "x"}]}, "Allowed: user"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "parts of text"),
        ({"input": [{"role": "user", "content": 5}]}, "has 5"),
        ({"input": [{"type": ["x"]}]}, "['x']"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"text": {"format": {"type": "odd"}}}, "odd"),
        ({"text": {"format": 5}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"stop": "x"}, "/v1/chat/completions has it"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": []}}, "reasoning.effort"),
        ({"prompt": {"id": "x"}}, "prompt is not supported"),
    ],
)
def test_what_has_no_meaning_here_is_refused(http, engine, fields, told: str) -> None:
    answer = http.post(ROUTE, json={"input": "Hello", **fields})
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert not engine.submits


def test_a_stream_that_fails_says_so(http, engine) -> None:
    for after in ("die_after", "fail_after"):
        engine.die_after = engine.fail_after = -1
        setattr(engine, after, 1)
        last = events(http)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["message"]
