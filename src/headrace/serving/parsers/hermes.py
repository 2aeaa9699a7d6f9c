"""Calls of Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from headrace.serving.parsers.call_writer import CallWriter
from headrace.serving.parsers.json_calls import read_call, read_call_list
from headrace.serving.parsers.scanner import SPACE, Scanner, Steps
from headrace.serving.parsers.tool_parser import CallForm, ToolParser, Tools, register_tool_parser

BEGIN, END = "<tool_call>", "</tool_call>"


def _read(scanner: Scanner, calls: CallWriter, tools: Tools) -> Steps[None]:
    """One object in the tags, or an array, or several objects. The end tag may be missing."""
    yield from scanner.expect(BEGIN)
    yield from scanner.skip_space()
    while True:
        if (yield from scanner.peek()) == "[":
            yield from read_call_list(scanner, calls)
        else:
            yield from read_call(scanner, calls)
        ahead = yield from scanner.space_ahead()
        if (yield from scanner.peek(ahead)) != "{":
            break
        scanner.take(ahead)
    while (character := (yield from scanner.peek(ahead))) and character in SPACE + "}":
        ahead += 1  # models are known to close one brace too many
    if (yield from scanner.literal_ahead((END,), ahead)):
        scanner.take(ahead + len(END))


register_tool_parser("hermes", "qwen", "qwen25")(
    ToolParser(
        read=_read,
        markers=(BEGIN,),
        special_markers=(BEGIN, END),
        trims=True,
        form=CallForm(
            begin=BEGIN + '\n{"name": "NAME", "arguments": ',
            end="}\n" + END,
            separator="\n",
            trigger=BEGIN,
        ),
    )
)
