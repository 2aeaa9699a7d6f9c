"""Tool calls of chat: what a client sees of what a model writes, streamed and not."""

import json
from typing import Any

import pytest
from tool_chat import (
    BOTH,
    CLOCK,
    FAMILIES,
    HELLO,
    NAMED,
    ONE,
    OSLO,
    TOOLS,
    WEATHER,
    at_random,
    collected,
    without_ids,
)

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
