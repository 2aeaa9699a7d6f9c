"""When a client sees what, and how a family is added."""

import pytest

from headrace.serving.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    CallArguments,
    CallEnded,
    CallStarted,
    CallWriter,
    ContentText,
    Interpreter,
    ReasoningText,
    Scanner,
    Steps,
    ToolParser,
    Tools,
    collect,
)


def interpreter(tools: str | None = "hermes", **more: object) -> Interpreter:
    parser = TOOL_PARSERS.entries(tools)[0] if tools else None
    return Interpreter(tool_parser=parser, **more)  # type: ignore[arg-type]


def test_text_waits_only_while_it_can_become_a_marker() -> None:
    reader = interpreter()
    assert reader.feed("a < b <tool") == [ContentText("a < b")]
    assert reader.feed("_") == []
    assert reader.feed("box>") == [ContentText(" <tool_box>")]
    assert reader.feed(" ") == []  # may be what sets off a call
    assert reader.feed("c<tool_call") == [ContentText(" c")]
    assert reader.finish() == [ContentText("<tool_call")]


def test_text_that_is_no_call_goes_on_at_once() -> None:
    reader = interpreter("llama3_json")
    assert reader.feed('{"na') == []
    assert reader.feed('med": 1') == [ContentText('{"named": 1')]
    assert reader.feed(', "b": 2}') == [ContentText(', "b": 2}')]
    assert reader.finish() == []


def test_reasoning_streams() -> None:
    reader = interpreter(None, reasoning_parser=REASONING_PARSERS.entries("think")[0])
    assert reader.feed("<thi") == []
    assert reader.feed("nk>\nab ") == [ReasoningText("ab")]
    assert reader.feed("c</thin") == [ReasoningText(" c")]
    assert reader.feed("k>\n\nd") == [ContentText("d")]
    assert reader.finish() == []


def test_a_call_is_shown_once_it_is_complete() -> None:
    reader = interpreter()
    assert reader.feed('<tool_call>{"name": "f", "arguments": {"a": 1}') == []
    start, arguments, end = reader.feed("}")
    assert isinstance(start, CallStarted)
    assert (start.index, start.name) == (0, "f")
    assert (arguments, end) == (CallArguments(0, '{"a": 1}'), CallEnded(0))
    assert reader.feed("</tool_call>") + reader.finish() == []


def test_a_live_call_is_shown_as_it_comes() -> None:
    reader = interpreter(live=True)
    (start, arguments) = reader.feed('<tool_call>{"name": "f", "arguments": {"a": "x')
    assert isinstance(start, CallStarted)
    assert arguments == CallArguments(0, '{"a": "x')
    assert reader.feed('y"}') == [CallArguments(0, 'y"}')]
    assert reader.feed("}</tool_call>") == [CallEnded(0)]
    assert reader.finish() == []


def test_a_live_call_that_breaks_keeps_what_was_shown() -> None:
    reader = interpreter(live=True)
    reader.feed('<tool_call>{"name": "f", "arguments": {"a":')
    assert reader.feed("oops}}") == [CallEnded(0), ContentText("oops}}")]
    assert reader.finish() == []
    reader = interpreter(live=True)
    reader.feed('<tool_call>{"name": "f", "arguments": {"a": "x')
    assert reader.finish() == [CallEnded(0)]
    assert reader.finish_reason("length") == "length"


def test_calls_beyond_the_most_are_left_out() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    reader = interpreter(most_calls=1)
    got = collect([*reader.feed(call + call + "x"), *reader.finish()])
    assert [each.name for each in got.calls] == ["f"]
    assert got.content == "x"


@pytest.mark.parametrize(
    ("text", "reason", "told"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', "stop", "tool_calls"),
        ('<tool_call>{"name": "f"}</tool_call>', "length", "length"),
        ('<tool_call>{"name": "f"}</tool_call>', "abort", "abort"),
        ('<tool_call>{"name": "f"', "stop", "stop"),
        ("Hello", "stop", "stop"),
    ],
)
def test_finish_reason(text: str, reason: str, told: str) -> None:
    reader = interpreter()
    reader.feed(text)
    reader.finish()
    assert reader.finish_reason(reason) == told


def test_without_parsers_all_is_content() -> None:
    reader = interpreter(None)
    text = ' \n<think>a</think><tool_call>{"name": "f"}</tool_call>\n'
    events = [event for letter in text for event in reader.feed(letter)]
    assert collect([*events, *reader.finish()]).content == text


def test_a_family_is_one_function() -> None:
    def read(scanner: Scanner, calls: CallWriter, tools: Tools) -> Steps[None]:
        yield from scanner.expect("@call ")
        name = ""
        while (yield from scanner.peek()).isalpha():
            name += scanner.take(1)
        yield from scanner.expect(";")
        calls.start(name)
        calls.arguments("{}")
        calls.end()

    reader = Interpreter(tool_parser=ToolParser(read=read, markers=("@call",)))
    got = collect([*reader.feed("x @call a;y @call 1;"), *reader.finish()])
    assert [call.name for call in got.calls] == ["a"]
    assert got.content == "x y @call 1;"
