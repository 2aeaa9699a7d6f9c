"""Calls of Qwen3-Coder and of Qwen 3.5 and later, in tags:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value as plain text
    </parameter>
    </function>
    </tool_call>

A value has no escapes and may hold what looks like a tag, so it ends where its end tag is followed
by what can only follow a value. What a value means, a string or JSON, only the tool's schema tells.
"""

import json

from headrace.serving.parsers.call_writer import CallWriter
from headrace.serving.parsers.plain_values import json_of
from headrace.serving.parsers.scanner import SPACE, Markers, Scanner, Steps, Unreadable
from headrace.serving.parsers.tool_parser import CallForm, ToolParser, Tools, register_tool_parser

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_LONGEST_NAME = 256
_VALUE_ENDS = Markers((PARAMETER_END, FUNCTION_END, PARAMETER))


def _read(scanner: Scanner, calls: CallWriter, tools: Tools) -> Steps[None]:
    """The outer tags may be missing: models are known to begin with the function."""
    yield from scanner.accept(BEGIN)
    while True:
        yield from scanner.skip_space()
        yield from _read_function(scanner, calls, tools)
        ahead = yield from scanner.space_ahead()
        if (yield from scanner.literal_ahead((END,), ahead)):
            scanner.take(ahead + len(END))
            return
        if not (yield from scanner.literal_ahead((FUNCTION,), ahead)):
            return


def _read_function(scanner: Scanner, calls: CallWriter, tools: Tools) -> Steps[None]:
    yield from scanner.expect(FUNCTION)
    name = yield from _name(scanner)
    root = tools.get(name, {})
    properties = root.get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    calls.start(name)
    opening = "{"
    while True:
        yield from scanner.skip_space()
        if (yield from scanner.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            break
        key = yield from _name(scanner)
        value = yield from _value(scanner)
        calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        calls.arguments(json_of(value, schemas.get(key), root))
        opening = ", "
    calls.arguments("{}" if opening == "{" else "}")
    calls.end()


def _name(scanner: Scanner) -> Steps[str]:
    """Up to the `>`; on one line."""
    size = 0
    while (character := (yield from scanner.peek(size))) != ">":
        size += 1
        if not character or character in "\r\n<" or size > _LONGEST_NAME:
            raise Unreadable
    name = scanner.take(size)
    scanner.take(1)
    if not name.strip():
        raise Unreadable
    return name.strip()


def _value(scanner: Scanner) -> Steps[str]:
    """The text up to its end tag, or to where the next tag stands on a line of its own."""
    pieces: list[str] = []
    while word := (yield from scanner.until(_VALUE_ENDS, pieces.append)):
        starts_line = bool(pieces) and pieces[-1].endswith("\n")
        if word == PARAMETER_END:
            if (yield from _follows(scanner, len(word), (PARAMETER, FUNCTION_END))):
                scanner.take(len(word))
                break
        elif word == FUNCTION_END:
            if (yield from _follows(scanner, len(word), (END,))):
                break
        elif starts_line and (yield from _is_tag_line(scanner)):
            break
        pieces.append(scanner.take(len(word)))
    else:
        raise Unreadable
    return "".join(pieces).removeprefix("\n").removesuffix("\n")


def _follows(scanner: Scanner, ahead: int, words: tuple[str, ...]) -> Steps[bool]:
    ahead = yield from scanner.space_ahead(ahead)
    return bool((yield from scanner.literal_ahead(words, ahead)))


def _is_tag_line(scanner: Scanner) -> Steps[bool]:
    """Whether the line that begins here is one opening tag."""
    ahead = len(PARAMETER)
    while (character := (yield from scanner.peek(ahead))) and character not in SPACE + "<>":
        ahead += 1
    return character == ">" and (yield from scanner.peek(ahead + 1)) == "\n"


register_tool_parser("qwen3_coder", "qwen3_xml")(
    ToolParser(
        read=_read,
        markers=(BEGIN, FUNCTION),
        special_markers=(BEGIN, END),
        ends_reasoning=(BEGIN,),
        trims=True,
        form=CallForm(
            begin=BEGIN + "\n<function=NAME>\n",
            end="\n" + FUNCTION_END + "\n" + END,
            separator="\n",
            trigger=BEGIN,
            style="qwen_xml",
        ),
    )
)
