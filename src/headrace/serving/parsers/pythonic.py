"""Calls of Llama 3.2 and 4 written as Python: [name(key="value"), other()], alone or between
<|python_start|> and <|python_end|>. They count once the list is closed."""

import ast
import json

from headrace.serving.parsers.call_writer import CallWriter
from headrace.serving.parsers.plain_values import parsed_python, python_to_json
from headrace.serving.parsers.scanner import Scanner, Steps, Unreadable
from headrace.serving.parsers.tool_parser import ToolParser, Tools, register_tool_parser

BEGIN, END = "<|python_start|>", "<|python_end|>"
_LONGEST = 1 << 20


def _read(scanner: Scanner, calls: CallWriter, tools: Tools) -> Steps[None]:
    yield from scanner.skip_space()
    bare = not (yield from scanner.accept(BEGIN))
    yield from scanner.skip_space()
    found = _calls_in((yield from _list_text(scanner)))
    if not found or (bare and any(name not in tools for name, _ in found)):
        raise Unreadable
    for name, arguments in found:
        calls.start(name)
        calls.arguments(arguments)
        calls.end()
    ahead = yield from scanner.space_ahead()
    if (yield from scanner.literal_ahead((END,), ahead)):
        scanner.take(ahead + len(END))


def _list_text(scanner: Scanner) -> Steps[str]:
    """Read to the bracket that closes the list; brackets inside of strings do not count."""
    pieces = [(yield from scanner.expect("["))]
    pieces.append((yield from scanner.skip_space()))
    first = yield from scanner.peek()
    if not (first.isalpha() or first == "_"):
        raise Unreadable
    depth, quote, size = 1, "", 0
    while depth:
        character = yield from scanner.peek()
        size += 1
        if not character or size > _LONGEST:
            raise Unreadable
        if quote:
            if character == "\\" and (yield from scanner.peek(1)):
                pieces.append(scanner.take(2))
                continue
            if character == "\n" or character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
        pieces.append(scanner.take(1))
    return "".join(pieces)


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Names and arguments; empty if the text is anything but a list of calls of literals."""
    tree = parsed_python(text)
    if not isinstance(tree, ast.List):
        return []
    found = []
    for call in tree.elts:
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute)):
            return []
        if call.args or any(each.arg is None for each in call.keywords):
            return []
        try:
            arguments = [
                f"{json.dumps(each.arg)}: {python_to_json(each.value)}" for each in call.keywords
            ]
        except ValueError:
            return []
        found.append((ast.unparse(call.func), "{" + ", ".join(arguments) + "}"))
    return found


register_tool_parser("pythonic", "llama4_pythonic")(
    ToolParser(read=_read, markers=(BEGIN,), starts="[", special_markers=(BEGIN, END))
)
