"""Calls of Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}, alone, after <|python_tag|>, or
several with `;` between."""

from headrace.serving.parsers.call_writer import CallWriter
from headrace.serving.parsers.json_calls import read_call
from headrace.serving.parsers.scanner import Scanner, Steps
from headrace.serving.parsers.tool_parser import CallForm, ToolParser, Tools, register_tool_parser

TAG = "<|python_tag|>"


def _read(scanner: Scanner, calls: CallWriter, tools: Tools) -> Steps[None]:
    yield from scanner.skip_space()
    bare = not (yield from scanner.accept(TAG))
    yield from scanner.skip_space()
    while True:
        yield from read_call(scanner, calls, bare=bare, names=tools)
        ahead = yield from scanner.space_ahead()
        if (yield from scanner.peek(ahead)) == ";":
            ahead = yield from scanner.space_ahead(ahead + 1)
        if (yield from scanner.peek(ahead)) != "{":
            return
        scanner.take(ahead)


register_tool_parser("llama3_json", "llama3")(
    ToolParser(
        read=_read,
        markers=(TAG,),
        starts="{",
        special_markers=(TAG,),
        form=CallForm(begin='{"name": "NAME", "parameters": ', end="}", separator="; "),
    )
)
