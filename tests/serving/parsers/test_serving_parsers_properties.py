"""Any text, cut anywhere: the same answer, nothing lost, nothing raised."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    CallArguments,
    CallEnded,
    CallStarted,
    Collected,
    ContentText,
    Interpreter,
    ReasoningText,
    collect,
)

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {}}},
    "clock": {"type": "object"},
}
FAMILIES = ("hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic")
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=", "weather", ">", "</function>", "<parameter=city>",
    "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    "[THINK]", "[/THINK]", '{"name": "weather", "arguments": ', '{"city": "Oslo"}', "}", "{", "[",
    "]", '"', "\\", "\\u00e9", "\\ud800", ":", ",", ";", "\n", " ", "name", "clock()", "[clock()]",
    "weather(city='x')", "<", "<tool", "[TOOL", "é", "雨", "1e5", "true", "\x00", "-", "word",
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    '[TOOL_CALLS]clock[ARGS]{"a": [1, 2.50, "x\ny"]}',
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    '{"name": "clock", "parameters": {}}',
)  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def interpreter(family: str, reasoning: str | None, *, live: bool, prompt: str = "") -> Interpreter:
    return Interpreter(
        tool_parser=TOOL_PARSERS.entries(family)[0],
        reasoning_parser=REASONING_PARSERS.entries(reasoning)[0] if reasoning else None,
        tools=TOOLS,
        prompt=prompt,
        live=live,
    )


def read(reader: Interpreter, pieces: list[str]) -> list[object]:
    events = [event for piece in pieces for event in reader.feed(piece)]
    return [*events, *reader.finish()]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def nameless(answer: Collected) -> tuple[object, ...]:
    """All but the random ids."""
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.content, calls


def order(events: list[object]) -> list[object]:
    """The events with neighbouring texts joined and no ids."""
    kinds: list[object] = []
    for event in events:
        match event:
            case CallStarted(index, _, name):
                kinds.append((index, name))
            case CallEnded(index):
                kinds.append(index)
            case CallArguments() | ContentText() | ReasoningText():
                if kinds and isinstance(kinds[-1], list) and kinds[-1][0] is type(event):
                    kinds[-1][1] += event.text
                else:
                    kinds.append([type(event), event.text])
    return kinds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("live", [False, True])
@settings(max_examples=120, deadline=None)
@given(
    text=texts,
    places=st.lists(st.integers(0, 500), max_size=12),
    reasoning=st.sampled_from([None, "think", "deepseek_r1", "mistral"]),
)
def test_cuts_change_nothing(
    family: str, live: bool, text: str, places: list[int], reasoning: str | None
) -> None:
    whole = order(read(interpreter(family, reasoning, live=live), [text]))
    some = order(read(interpreter(family, reasoning, live=live), cut(text, places)))
    single = order(read(interpreter(family, reasoning, live=live), list(text)))
    assert whole == some == single


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_text_without_a_call_is_the_content(family: str, text: str) -> None:
    answer = collect(read(interpreter(family, None, live=False), [text]))
    if answer.calls:
        return
    markers = TOOL_PARSERS.entries(family)[0].markers
    left = text.rstrip()  # a marker with nothing after it is no text
    bare = {left.removesuffix(word) for word in markers if left.endswith(word)}
    assert answer.content in {text} | bare | {each.rstrip() for each in bare}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_calls_are_whole_and_their_arguments_json_objects(family: str, text: str) -> None:
    events = read(interpreter(family, "think", live=False), [text])
    for call in collect(events).calls:
        assert isinstance(json.loads(call.arguments), dict)
    starts = [event.index for event in events if isinstance(event, CallStarted)]
    ends = [event.index for event in events if isinstance(event, CallEnded)]
    assert starts == ends == list(range(len(starts)))
    "".join(map(str, events)).encode()  # half a surrogate pair would break the reply


plain = st.text("abc xyz.\n,é<>-", max_size=20).filter(
    lambda text: not re.search("<(tool|func|/)", text)
)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=4).filter(
    lambda value: "\ud800" not in str(value)
)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.tuples(plain, arguments), max_size=4),
    tail=plain,
    places=st.lists(st.integers(0, 2000), max_size=12),
    ascii_only=st.booleans(),
    live=st.booleans(),
)
def test_calls_among_text(
    parts: list[tuple[str, dict[str, object]]],
    tail: str,
    places: list[int],
    ascii_only: bool,
    live: bool,
) -> None:
    """Content is the text around the calls; arguments are the very text the model wrote."""
    written = [json.dumps(value, ensure_ascii=ascii_only) for _, value in parts]
    text = "".join(
        f'{before}<tool_call>\n{{"name": "clock", "arguments": {value}}}\n</tool_call>'
        for (before, _), value in zip(parts, written, strict=True)
    )
    answer = collect(read(interpreter("hermes", None, live=live), cut(text + tail, places)))
    assert [call.arguments for call in answer.calls] == written
    around = "".join(before for before, _ in parts) + tail
    assert re.sub(r"\s", "", answer.content) == re.sub(r"\s", "", around)
