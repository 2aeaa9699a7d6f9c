"""Calls of Mistral: [TOOL_CALLS]name[ARGS]{...} each (tokenizer v11 and later), before that
[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]. Both are read under both names; the names
differ in what a grammar makes the model write."""

from headrace.serving.parsers.call_writer import CallWriter, mistral_id
from headrace.serving.parsers.json_calls import read_call, read_call_list
from headrace.serving.parsers.json_text import read_value
from headrace.serving.parsers.scanner import Scanner, Steps, Unreadable
from headrace.serving.parsers.tool_parser import CallForm, ToolParser, Tools, register_tool_parser

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LONGEST_WORD = 256


def _read(scanner: Scanner, calls: CallWriter, tools: Tools) -> Steps[None]:
    yield from scanner.expect(BEGIN)
    yield from scanner.skip_space()
    character = yield from scanner.peek()
    if character == "[":
        yield from read_call_list(scanner, calls)
    elif character == "{":
        yield from read_call(scanner, calls)
    else:
        yield from _read_named(scanner, calls)


def _read_named(scanner: Scanner, calls: CallWriter) -> Steps[None]:
    name = yield from _word(scanner)
    call_id = None
    if (yield from scanner.accept(CALL_ID)):
        call_id = yield from _word(scanner)
    yield from scanner.skip_space()
    yield from scanner.accept(ARGUMENTS)
    yield from scanner.skip_space()
    if (yield from scanner.peek()) != "{":
        raise Unreadable
    calls.start(name, call_id)
    yield from read_value(scanner, calls.arguments)
    calls.end()


def _word(scanner: Scanner) -> Steps[str]:
    size = 0
    while (character := (yield from scanner.peek(size))) and (
        character.isalnum() or character in "_-.:/"
    ):
        size += 1
        if size > _LONGEST_WORD:
            raise Unreadable
    if size == 0:
        raise Unreadable
    return scanner.take(size)


def _parser(form: CallForm | None) -> ToolParser:
    return ToolParser(
        read=_read,
        markers=(BEGIN,),
        special_markers=(BEGIN, ARGUMENTS, CALL_ID),
        form=form,
        make_id=mistral_id,
    )


register_tool_parser("mistral")(
    _parser(CallForm(begin=BEGIN + "NAME" + ARGUMENTS, end="", trigger=BEGIN))
)
register_tool_parser("mistral_v3")(
    _parser(
        CallForm(begin=BEGIN + '[{"name": "NAME", "arguments": ', end="}]", trigger=BEGIN + "[")
    )
)
