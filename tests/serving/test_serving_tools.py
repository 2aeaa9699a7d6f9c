"""Tool calls and reasoning of chat: what a client sees of what a model writes, streamed and not."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_checkpoint import TEMPLATES, write_chat_checkpoint
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sse import events_of
from starlette.testclient import TestClient

from headrace.config.engine_config import EngineConfig
from headrace.request.outcome import Finished
from headrace.serving.app import make_app
from headrace.serving.prompts import load_tokenizer
from headrace.serving.server_config import ServerConfig
from headrace.serving.service import Service
from headrace.text.tokenizer import Tokenizer

ROUTE = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock"}}
OSLO = '{"city": "Oslo"}'
ONE = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{OSLO}",
    "llama3_json": f'{{"name": "weather", "parameters": {OSLO}}}',
}
BOTH = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "mistral": ONE["mistral"] + "[TOOL_CALLS]clock[ARGS]{}",
    "llama3_json": ONE["llama3_json"] + '; {"name": "clock", "parameters": {}}',
}
FAMILIES = sorted(ONE)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for family in TEMPLATES:
        folder = write_chat_checkpoint(tmp_path_factory.mktemp("chat") / family, family)
        tokenizer = load_tokenizer(EngineConfig(model=str(folder)))
        assert tokenizer is not None
        made[family] = tokenizer
    return made


@pytest.fixture
def chat(tokenizers: dict[str, Tokenizer], engine: FakeEngine) -> Iterator[Callable[..., "Chat"]]:
    """Makes a server for a family."""
    clients: list[TestClient] = []

    def make(family: str, **options: Any) -> "Chat":
        service = Service(
            config=ServerConfig(**options), asked=EngineConfig(model="tiny"), engine=engine,
            tokenizer=tokenizers[family],
        )  # fmt: skip
        client = TestClient(make_app(service), raise_server_exceptions=False)
        clients.append(client)
        return Chat(client, engine)

    yield make
    for client in clients:
        client.close()


class Chat:
    """Asks the server, which has a model that says `words`."""

    def __init__(self, http: TestClient, engine: FakeEngine) -> None:
        self.http, self.engine = http, engine

    def says(self, *words: str, reason: str = "stop") -> None:
        self.engine.words, self.engine.finished = list(words), Finished(reason)

    def choices(self, **body: Any) -> list[dict[str, Any]]:
        return self.reply(**body)["choices"]

    def message(self, **body: Any) -> dict[str, Any]:
        return self.choices(**body)[0]["message"]

    def reply(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post(ROUTE, json={"messages": HELLO, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post(ROUTE, json={"messages": HELLO, **body})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def chunks(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.http.post(ROUTE, json={"messages": HELLO, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        return [choice for each in events_of(answer.text) for choice in each["choices"]]


def collected(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that chunks of one choice add up to, as strict clients add."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk["delta"]
        for name in ("role", "content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = message.get(name, "") + delta[name]
        assert len(delta.get("tool_calls", [])) <= 1  # clients look at the first one only
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert (piece["index"], piece["type"]) == (len(calls), "function")
                assert piece["function"]["arguments"] == ""
                calls.append({"id": piece["id"], "type": "function", "function": piece["function"]})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {})


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in message.items() if name != "refusal"}
    told["content"] = told.get("content") or ""
    if "tool_calls" in told:
        told["tool_calls"] = [each["function"] for each in told["tool_calls"]]
    return told


def at_random(text: str, seed: int) -> list[str]:
    """The text in pieces of one to seven characters."""
    draw, words = random.Random(seed), []
    while text:
        size = draw.randint(1, 7)
        words.append(text[:size])
        text = text[size:]
    return words


# ---- calls


@pytest.mark.parametrize("family", FAMILIES)
def test_calls(chat, family: str) -> None:
    asked = chat(family)
    asked.says(*at_random(BOTH[family], 1))
    (choice,) = asked.choices(tools=TOOLS)
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    first, second = message["tool_calls"]
    assert set(first) == {"id", "type", "function"}
    assert first["type"] == "function"
    assert first["function"] == {"name": "weather", "arguments": OSLO}
    assert second["function"] == {"name": "clock", "arguments": "{}"}
    assert first["id"] != second["id"]


@pytest.mark.parametrize("live", [False, True], ids=["whole", "live"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_of_calls(chat, family: str, live: bool) -> None:
    asked = chat(family, stream_tool_arguments=live)
    asked.says(*at_random(BOTH[family], 2))
    chunks = asked.chunks(tools=TOOLS)
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    pieces = [chunk["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["delta"]]
    of_weather = [each["function"]["arguments"] for each in pieces if each["index"] == 0]
    assert "".join(of_weather) == OSLO
    assert (len(of_weather) > 2) == live
    assert without_ids(collected(chunks)) == without_ids(asked.message(tools=TOOLS))


def test_text_before_a_call_is_content(chat) -> None:
    asked = chat("hermes")
    asked.says("Let me see. ", ONE["hermes"])
    assert asked.message(tools=TOOLS)["content"] == "Let me see."
    chunks = asked.chunks(tools=TOOLS)
    assert [chunk["delta"] for chunk in chunks[1:-2]] == [{"content": "Let me see."}]
    assert [chunk["finish_reason"] for chunk in chunks[-2:]] == [None, "tool_calls"]


def test_a_call_that_is_cut_off_is_no_call(chat) -> None:
    asked = chat("hermes")
    written = ONE["hermes"][:56]
    asked.says(written, reason="length")
    (choice,) = asked.choices(tools=TOOLS)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", written)
    assert "tool_calls" not in choice["message"]
    live = chat("hermes", stream_tool_arguments=True)
    (choice,) = live.choices(tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_each_choice_has_its_calls(chat) -> None:
    asked = chat("hermes")
    asked.says(*at_random(ONE["hermes"], 3))
    choices = asked.choices(tools=TOOLS, n=3)
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
    chunks = asked.chunks(tools=TOOLS, n=3)
    for index in range(3):
        own = collected([chunk for chunk in chunks if chunk["index"] == index])
        assert without_ids(own) == without_ids(choices[index]["message"])


def test_what_the_model_is_held_to(chat) -> None:
    asked = chat("hermes")
    asked.says(ONE["hermes"])
    asked.reply(tools=TOOLS)
    assert asked.engine.params.structured is None  # auto: the model is free
    asked.reply(tools=TOOLS, tool_choice="none")
    assert asked.engine.params.structured is None
    for asks in ({"tool_choice": "required"}, {"tool_choice": NAMED}):
        asked.reply(tools=TOOLS, **asks)
        form = asked.engine.params.structured
        assert form.kind == "structural_tag"
        assert "clock" in form.text
        assert ("weather" in form.text) == (asks["tool_choice"] == "required")
    asked.reply(tools=TOOLS, parallel_tool_calls=False)
    assert "triggered_tags" in asked.engine.params.structured.text


def test_a_form_of_the_content_beside_tools_and_reasoning(chat) -> None:
    asked = chat("hermes")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    thinks_not = {"chat_template_kwargs": {"enable_thinking": False}}

    def held_to(**body: Any) -> Any:
        asked.reply(response_format=form, **body)
        return asked.engine.params.structured

    assert held_to(**thinks_not).kind == "json_schema"
    behind = held_to()
    assert (behind.kind, "</think>" in behind.text) == ("structural_tag", True)
    either = held_to(tools=TOOLS, **thinks_not).text
    assert '"type": "or"' in either
    assert "integer" in either
    assert "weather" in either
    calls = held_to(tools=TOOLS, tool_choice="required", **thinks_not).text
    assert ("weather" in calls, "integer" in calls) == (True, False)
    assert held_to(tools=TOOLS, tool_choice="none", **thinks_not).kind == "json_schema"
    # What reads no reasoning must not forbid it.
    assert held_to(separate_reasoning=False) == behind


def test_no_call_where_none_may_be(chat) -> None:
    asked = chat("hermes")
    asked.says(ONE["hermes"])
    (choice,) = asked.choices(tools=TOOLS, tool_choice="none")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", ONE["hermes"])
    assert '"name": "weather"' in asked.engine.submits[0].prompt_text  # the template is told


def test_special_tokens_show_where_markers_are_some(chat) -> None:
    for family, special in (("mistral", True), ("hermes", False)):
        asked = chat(family)
        asked.says(ONE[family])
        asked.reply(tools=TOOLS, tool_choice="required", skip_special_tokens=True)
        params = asked.engine.params
        assert params.skip_special_tokens == (not special)
        assert ("[TOOL_CALLS]" in params.structured.special_tokens) == special


def test_logprobs_cover_all_tokens(chat) -> None:
    asked = chat("hermes")
    asked.says("<think>", "Hm", "</think>", "So ", ONE["hermes"])
    count = asked.reply(tools=TOOLS)["usage"]["completion_tokens"]
    (choice,) = asked.choices(tools=TOOLS, logprobs=True)
    assert len(choice["logprobs"]["content"]) == count
    told = []
    for chunk in asked.chunks(tools=TOOLS, logprobs=True):
        told += chunk["logprobs"]["content"] if chunk["logprobs"] else []
    assert told == choice["logprobs"]["content"]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"tools": []}, "tools", "at least one tool"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "an object with a name"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "each name once"),
        ({"tools": "clock"}, "tools", "array"),
        ({"tool_choice": "auto"}, "tool_choice", "no tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice", "'clock'"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "required"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls", "boolean"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "minimal"),
        ({"include_reasoning": "no"}, "include_reasoning", "boolean"),
    ],
)
def test_what_cannot_be_asked(chat, body, param: str, told: str) -> None:
    error = chat("hermes").refused(**body)
    assert error["param"] == param
    assert told in error["message"]


def test_a_server_without_a_parser_refuses_tools(chat) -> None:
    asked = chat("hermes", tool_call_parser="none")
    error = asked.refused(tools=TOOLS)
    assert (error["code"], "--tool-call-parser" in error["message"]) == ("unsupported", True)
    asked.says("Hi")
    assert asked.message(tools=TOOLS, tool_choice="none")["content"] == "Hi"


# ---- history


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    return [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]


@pytest.mark.parametrize("arguments", [OSLO, json.loads(OSLO)], ids=["text", "object"])
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_the_history_reach_the_template(chat, family: str, arguments: Any) -> None:
    asked = chat(family)
    asked.reply(messages=history(arguments), tools=TOOLS)
    prompt = asked.engine.submits[0].prompt_text
    assert f"<assistant>{ONE[family]}</s><tool>rain</s><assistant>" in prompt


def test_a_message_without_content_has_an_empty_one(chat, tokenizers, monkeypatch) -> None:
    asked, seen = chat("hermes"), {}

    def template(messages, **options):
        seen.update(messages=messages)
        return "x"

    monkeypatch.setattr(tokenizers["hermes"], "apply_chat_template", template)
    asked.reply(messages=history(OSLO), tools=TOOLS)
    assert [message["content"] for message in seen["messages"]] == ["Hello", "", "rain"]


def test_arguments_of_the_history_must_be_an_object(chat) -> None:
    asked = chat("hermes")
    for arguments in ("{", "3", [1]):
        told = asked.refused(messages=history(arguments), tools=TOOLS)["message"]
        assert told.startswith("tool call 0 of message 1 has the arguments")
    for arguments in ("", None):
        asked.reply(messages=history(arguments), tools=TOOLS)
        assert '"arguments": {}}' in asked.engine.submits[-1].prompt_text
    for calls in ("x", [3], [{}], [{"function": {}}]):
        message = {"role": "assistant", "tool_calls": calls}
        assert "message 1 is" in asked.refused(messages=[*HELLO, message])["message"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_the_history_has_two_names(chat, name: str) -> None:
    asked = chat("hermes")
    asked.reply(messages=[*HELLO, {"role": "assistant", "content": "Hi", name: "Hm"}, *HELLO])
    assert "<assistant><think>Hm</think>Hi</s>" in asked.engine.submits[0].prompt_text


# ---- reasoning


def test_reasoning_has_two_names(chat) -> None:
    asked = chat("hermes")
    asked.says("<thi", "nk>\nWell", ".\n</think>", "\n\nYes")
    message = asked.message()
    assert message["content"] == "Yes"
    assert message["reasoning"] == message["reasoning_content"] == "Well."
    deltas = [chunk["delta"] for chunk in asked.chunks()]
    assert deltas[1] == {"reasoning": "Well", "reasoning_content": "Well"}
    assert deltas[-1] == {"content": "Yes"}


def test_how_reasoning_is_shown(chat) -> None:
    asked = chat("hermes")
    asked.says("<think>", "We", "ll", "</think>", "Yes")
    raw = asked.message(separate_reasoning=False)
    assert raw["content"] == "<think>Well</think>Yes"
    assert "reasoning" not in raw
    hidden = asked.message(include_reasoning=False)
    assert hidden == {"role": "assistant", "content": "Yes", "refusal": None}
    assert not any("reasoning" in chunk["delta"] for chunk in asked.chunks(include_reasoning=False))
    at_once = [chunk["delta"] for chunk in asked.chunks(stream_reasoning=False)]
    assert at_once[1]["reasoning"] == "Well"
    off = chat("hermes", reasoning_parser="none")
    assert off.message()["content"] == "<think>Well</think>Yes"


def test_reasoning_that_never_ends(chat) -> None:
    asked = chat("hermes")
    asked.says("<think>", "We", "ll", reason="length")
    for asks in ({}, {"stream_reasoning": False}):
        (choice,) = asked.choices(**asks)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["message"]["reasoning"] == "Well"
        assert collected(asked.chunks(**asks))["reasoning"] == "Well"


def test_effort_as_the_template_takes_it(chat) -> None:
    asked = chat("hermes")
    for asks, thinks in (
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        # What is said to the template itself counts.
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
    ):
        asked.reply(**asks)
        prompt = asked.engine.submits[-1].prompt_text
        assert prompt.endswith("<assistant>" if thinks else "</think>\n\n")
    told = chat("mistral").refused(reasoning_effort="low")["message"]
    assert "knows neither it nor enable_thinking" in told
    chat("mistral").reply(reasoning_effort="none")  # no reasoning is asked for, and none comes
    chat("mistral", refuse_unsupported=False).reply(reasoning_effort="low")
    assert chat("hermes", refuse_unsupported=False).refused(reasoning_effort="x")["param"]


def test_a_message_that_is_continued_in_its_reasoning(chat) -> None:
    asked = chat("hermes")
    asked.says(" and so", "</think>", "Yes")
    begun = [*HELLO, {"role": "assistant", "content": "<think>Well"}]
    message = asked.message(messages=begun, continue_final_message=True)
    assert (message["reasoning"], message["content"]) == ("and so", "Yes")
    asked.says(", it is")
    begun = [*HELLO, {"role": "assistant", "content": "<think>Well</think>Yes"}]
    message = asked.message(messages=begun, continue_final_message=True)
    assert message["content"] == ", it is"


def test_reasoning_tokens(chat, tokenizers: dict[str, Tokenizer]) -> None:
    """The fake engine has a token per character; here the markers are given their own."""
    asked = chat("hermes")
    begin, end = (tokenizers["hermes"].token_id(each) for each in ("<think>", "</think>"))
    plain = asked.engine._delta

    def with_markers(submit, place, word, index):
        delta = plain(submit, place, word, index)
        marker = {"<think>": begin, "</think>": end}.get(word)
        delta.token_ids = delta.token_ids if marker is None else [marker]
        return delta

    asked.engine._delta = with_markers
    asked.says("<think>", "Well", "</think>", "Yes")
    details = asked.reply()["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 6}
    assert asked.reply(n=2)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
    asked.says("Yes")
    assert asked.reply()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    asked.says("<think>", "Well", reason="length")
    assert asked.reply()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    asked.says("<thi", "nk>Well", "</think>", "Yes")  # spelled out: not known
    assert "completion_tokens_details" not in asked.reply()["usage"]
    asked.says("<think>", "Well</thi", "nk>", "Yes")
    assert "completion_tokens_details" not in asked.reply()["usage"]


def test_decisions_are_told(chat) -> None:
    asked = chat("mistral", stream_tool_arguments=True)
    told = {each["name"]: each for each in asked.http.get("/explain").json()["serving"]}
    assert told["tool_call_parser"]["value"] == "mistral"
    assert "[TOOL_CALLS]" in told["tool_call_parser"]["reason"]
    assert told["reasoning_parser"]["value"] == "mistral"
    assert (told["stream_tool_arguments"]["value"], told["stream_tool_arguments"]["asked"]) == (
        True,
        True,
    )


# ---- any answer


FRAGMENTS = (
    *ONE.values(), *BOTH.values(), "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>",
    "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '{"name": "weather"', '"arguments": ', "{", "}",
    "Hello", " ", "\n", "é", "雨", OSLO, "<|python_tag|>", "weather", "<", "[",
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    family=st.sampled_from(FAMILIES),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=8),
    seed=st.integers(0, 99),
    live=st.booleans(),
    asks=st.sampled_from(
        [{}, {"separate_reasoning": False}, {"stream_reasoning": False},
         {"include_reasoning": False}, {"parallel_tool_calls": False}, {"tool_choice": "none"},
         {"n": 2}]
    ),
    reason=st.sampled_from(["stop", "length"]),
)  # fmt: skip
def test_the_stream_adds_up_to_the_whole(
    chat, family: str, parts: list[str], seed: int, live: bool, asks: Any, reason: str
) -> None:
    asked = chat(family, stream_tool_arguments=live)
    asked.says(*at_random("".join(parts), seed), "", reason=reason)
    choices = asked.choices(tools=TOOLS, **asks)
    asked.says(*at_random("".join(parts), seed + 1), "", reason=reason)
    chunks = asked.chunks(tools=TOOLS, **asks)
    for index, choice in enumerate(choices):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert without_ids(collected(own)) == without_ids(choice["message"])
        reasons = [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


# ---- any request


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 2**70)
    | st.sampled_from(["", "a", "\ud800", "none"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "parameters", "schema", "json_schema", "format",
                 "arguments", "structures", "begin", "properties", "json", "choice", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip
FIELDS = (
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs",
    "json_schema", "structural_tag", "guided_choice", "reasoning_effort", "separate_reasoning",
    "chat_template_kwargs",
)  # fmt: skip


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    body=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3),
    kind=st.sampled_from(["text", "json_object", "json_schema", "structural_tag", "function"]),
    calls=ODD,
    continues=st.booleans(),
)
def test_no_request_is_a_fault_of_the_server(chat, body, kind, calls, continues) -> None:
    for name in ("response_format", "tool_choice"):
        if isinstance(body.get(name), dict):
            body[name]["type"] = kind
    message = {"role": "assistant", "content": "<think>", "tool_calls": calls, "reasoning": calls}
    sent = {"messages": [*HELLO, message], "continue_final_message": continues, **body}
    answer = chat("hermes").http.post(
        ROUTE, content=json.dumps(sent), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.json()["error"]["message"]) <= 1000
