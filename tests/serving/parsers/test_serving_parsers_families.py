"""Outputs as models write them, and what a client must get."""

import json
import re

import pytest

from headrace.serving.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Collected,
    Interpreter,
    collect,
)

OBJECT = {"type": "object"}
TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "clock": OBJECT,
    "set": {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "size": {"type": "number"},
            "on": {"type": "boolean"},
            "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "items": {"type": "array"},
            "kind": {"enum": ["a", 2]},
            "text": {"type": "string"},
        },
    },
    "send": {  # as pydantic writes nested models
        "type": "object",
        "properties": {
            "to": {"$ref": "#/$defs/Place~1City"},
            "via": {"anyOf": [{"$ref": "#/$defs/Place~1City"}, {"type": "null"}]},
            "rest": {"properties": {"a": {}}},
            "loop": {"$ref": "#/$defs/Loop"},
            "none": {"$ref": "#/$defs/None"},
        },
        "$defs": {"Place/City": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
    },
}


def answer(
    text: str, tools: str | None = "hermes", reasoning: str | None = None, prompt: str = ""
) -> Collected:
    interpreter = Interpreter(
        tool_parser=TOOL_PARSERS.entries(tools)[0] if tools else None,
        reasoning_parser=REASONING_PARSERS.entries(reasoning)[0] if reasoning else None,
        tools=TOOLS,
        prompt=prompt,
    )
    return collect([*interpreter.feed(text), *interpreter.finish()])


def calls(got: Collected) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in got.calls]


HERMES = {
    "with text before": (
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call>",
        "Let me look.",
        [("weather", '{"city": "Oslo"}')],
    ),
    "two, white space between": (
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>\n',
        "",
        [("clock", "{}"), ("weather", '{"city": "Łódź"}')],
    ),
    "text on both sides": (
        'a <tool_call>{"name":"clock","arguments":{}}</tool_call>\n\nb',
        "a\n\nb",
        [("clock", "{}")],
    ),
    "text behind alone": ('<tool_call>{"name": "clock"}</tool_call>\n\nb', "b", [("clock", "{}")]),
    "numbers, escapes and spaces as written": (
        '<tool_call>{"name": "set", "arguments": {"size":1.50e+3,  "text": "\\u00e9\\/" }}'
        "</tool_call>",
        "",
        [("set", '{"size":1.50e+3,  "text": "\\u00e9\\/" }')],
    ),
    "a line break inside of a string": (
        '<tool_call>{"name": "set", "arguments": {"text": "a\n\tb"}}</tool_call>',
        "",
        [("set", '{"text": "a\\n\\tb"}')],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"name": "x"}, "name": "set"}</tool_call>',
        "",
        [("set", '{"name": "x"}')],
    ),
    "arguments inside of a string": (
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        "",
        [("weather", '{"city": "Oslo"}')],
    ),
    "no arguments": ('<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
    "null arguments": (
        '<tool_call>{"name": "clock", "arguments": null}</tool_call>',
        "",
        [("clock", "{}")],
    ),
    "an array": (
        '<tool_call>[{"name": "clock"}, {"name": "weather", "arguments": {}}]</tool_call>',
        "",
        [("clock", "{}"), ("weather", "{}")],
    ),
    "several objects": (
        '<tool_call>{"name": "clock"}\n{"name": "weather"}</tool_call>',
        "",
        [("clock", "{}"), ("weather", "{}")],
    ),
    "one brace too many": (
        '<tool_call>\n{"name": "clock", "arguments": {}}}\n</tool_call>',
        "",
        [("clock", "{}")],
    ),
    "no end tag": ('<tool_call>\n{"name": "clock", "arguments": {}}', "", [("clock", "{}")]),
    "markers in arguments": (
        '<tool_call>{"name": "set", "arguments": {"text": "</tool_call> <tool_call>"}}</tool_call>',
        "",
        [("set", '{"text": "</tool_call> <tool_call>"}')],
    ),
    "a tool nobody offered": (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        "",
        [("rm", "{}")],
    ),
    "a marker that is spoken of": (
        "Write <tool_call> first, <tool_ second.",
        "Write <tool_call> first, <tool_ second.",
        [],
    ),
    "not JSON": ("<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    "Python's words": (
        '<tool_call>{"name": "set", "arguments": {"on": True}}</tool_call>',
        '<tool_call>{"name": "set", "arguments": {"on": True}}</tool_call>',
        [],
    ),
    "not a number of JSON": (
        '<tool_call>{"name": "set", "arguments": {"size": NaN}}</tool_call> x',
        '<tool_call>{"name": "set", "arguments": {"size": NaN}}</tool_call> x',
        [],
    ),
    "half a surrogate pair in a name": (
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        [],
    ),
    "arguments that are no object": (
        '<tool_call>{"name": "set", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "set", "arguments": [1]}</tool_call>',
        [],
    ),
    "cut off in the arguments": (
        'So: <tool_call>\n{"name": "weather", "arguments": {"city": "Os',
        'So: <tool_call>\n{"name": "weather", "arguments": {"city": "Os',
        [],
    ),
    "cut off in the second call": (
        '<tool_call>{"name": "clock"}</tool_call><tool_call>{"na',
        '<tool_call>{"na',
        [("clock", "{}")],
    ),
    "cut off behind the marker": ("So.\n<tool_call>\n", "So.", []),
    "broken, then whole": (
        '<tool_call>{"a" 1}</tool_call>\n<tool_call>{"name": "clock"}</tool_call>',
        '<tool_call>{"a" 1}</tool_call>',
        [("clock", "{}")],
    ),
    "no call": ("\n Just text. \n", "\n Just text. \n", []),
}
LLAMA = {
    "alone": (
        '{"name": "weather", "parameters": {"city": "Oslo"}}',
        "",
        [("weather", '{"city": "Oslo"}')],
    ),
    "after white space": ('\n\n{"name": "clock", "parameters": {}}', "", [("clock", "{}")]),
    "tagged, with a type": (
        '<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}',
        "",
        [("clock", "{}")],
    ),
    "several": (
        '{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"city": "a;b"}}',
        "",
        [("clock", "{}"), ("weather", '{"city": "a;b"}')],
    ),
    "text before the tag": (
        'One moment. <|python_tag|>{"name": "clock", "parameters": {}}',
        "One moment. ",
        [("clock", "{}")],
    ),
    "an answer in JSON": ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "a tool nobody offered": (
        '{"name": "rm", "parameters": {}}',
        '{"name": "rm", "parameters": {}}',
        [],
    ),
    "a name alone": ('{"name": "clock"}', '{"name": "clock"}', []),
    "later in the text": (
        'Like {"name": "clock", "parameters": {}}',
        'Like {"name": "clock", "parameters": {}}',
        [],
    ),
    "code": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "a bad second one": (
        '{"name": "clock", "parameters": {}}; {"name": 1}',
        '; {"name": 1}',
        [("clock", "{}")],
    ),
}
MISTRAL = {
    "new": (
        'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
        "Hm.",
        [("weather", '{"city": "Oslo"}')],
    ),
    "new, two": (
        "[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]clock[ARGS]{}\n",
        "",
        [("clock", "{}"), ("clock", "{}")],
    ),
    "new, nothing between": ("[TOOL_CALLS]clock{}", "", [("clock", "{}")]),
    "array": (
        '[TOOL_CALLS] [{"name": "clock", "arguments": {}}, '
        '{"name": "weather", "arguments": {"city": "]"}}]',
        "",
        [("clock", "{}"), ("weather", '{"city": "]"}')],
    ),
    "array cut off": (
        '[TOOL_CALLS] [{"name": "clock", "arguments": {}}, {"name": "wea',
        ', {"name": "wea',
        [("clock", "{}")],
    ),
    "words": ("[TOOL_CALLS] are markers", "[TOOL_CALLS] are markers", []),
    "nothing": ("Hm.[TOOL_CALLS]", "Hm.", []),
}
CODER = {
    "values by schema": (
        "<tool_call>\n<function=set>\n<parameter=count>\n007\n</parameter>\n<parameter=size>\n1.50\n"
        "</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=label>\nnull\n</parameter>\n"
        "<parameter=items>\n['a', 1]\n</parameter>\n<parameter=kind>\n2\n</parameter>\n"
        "<parameter=text>\n12\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "set",
                '{"count": "007", "size": 1.50, "on": true, "label": null, "items": ["a", 1], '
                '"kind": 2, "text": "12"}',
            )
        ],
    ),
    "lines of text": (
        "Go.\n<tool_call>\n<function=set>\n<parameter=text>\n  a\n\n</parameter>\n</function>\n"
        "</tool_call>",
        "Go.",
        [("set", '{"text": "  a\\n"}')],
    ),
    "tags in a value": (
        "<tool_call>\n<function=set>\n<parameter=text>\n</parameter> and </function>, "
        "<parameter=x>\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("set", '{"text": "</parameter> and </function>, <parameter=x>"}')],
    ),
    "no outer tag, two functions": (
        "<function=clock>\n</function>\n<function=clock>\n</function>\n</tool_call>",
        "",
        [("clock", "{}"), ("clock", "{}")],
    ),
    "values of schemas that stand elsewhere": (
        '<tool_call>\n<function=send>\n<parameter=to>\n{"a": 1}\n</parameter>\n'
        '<parameter=via>\nnull\n</parameter>\n<parameter=rest>\n{"b": 2}\n</parameter>\n'
        "<parameter=loop>\n1\n</parameter>\n<parameter=none>\n{}\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("send", '{"to": {"a": 1}, "via": null, "rest": {"b": 2}, "loop": "1", "none": "{}"}')],
    ),
    "an unknown parameter is text": (
        "<tool_call><function=clock><parameter=é>1</parameter></function></tool_call>",
        "",
        [("clock", '{"é": "1"}')],
    ),
    "cut off": (
        "<tool_call>\n<function=set>\n<parameter=text>\nrm -rf /",
        "<tool_call>\n<function=set>\n<parameter=text>\nrm -rf /",
        [],
    ),
}
PYTHONIC = {
    "two": (
        "[weather(city='Ålesund', days=[1, -2.5, None, True]), clock()]",
        "",
        [("weather", '{"city": "Ålesund", "days": [1, -2.5, null, true]}'), ("clock", "{}")],
    ),
    "brackets in strings": ("[weather(city=')]\\'')]", "", [("weather", '{"city": ")]\'"}')]),
    "between tags": ("<|python_start|>[rm()]<|python_end|>", "", [("rm", "{}")]),
    "a list": ("[clock, clock]", "[clock, clock]", []),
    "a link": ("[docs](https://a.b) say so", "[docs](https://a.b) say so", []),
    "not a literal": ("[clock(a=open('x'))]", "[clock(a=open('x'))]", []),
    "a tool nobody offered": ("[rm()]", "[rm()]", []),
    "cut off": ("[clock(), weather(city='Os", "[clock(), weather(city='Os", []),
}
CASES = [
    pytest.param(family, *case, id=f"{family}: {title}")
    for family, cases in (
        ("hermes", HERMES),
        ("llama3_json", LLAMA),
        ("mistral", MISTRAL),
        ("qwen3_coder", CODER),
        ("pythonic", PYTHONIC),
    )
    for title, case in cases.items()
]


@pytest.mark.parametrize(("family", "text", "content", "expected"), CASES)
def test_tool_calls(family: str, text: str, content: str, expected: list[tuple[str, str]]) -> None:
    got = answer(text, family)
    assert (got.content, calls(got), got.reasoning) == (content, expected, "")


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "thought", "content"),
    [
        ("think", "", "<think>\na\n\nb\n</think>\n\nSo: c\n", "a\n\nb", "So: c\n"),
        ("think", "", "No thought.</think>", "", "No thought.</think>"),
        ("think", "", "I <think>", "", "I <think>"),
        ("think", "<|im_start|>assistant\n<think>\n", "a\n</think>\n\nb", "a", "b"),
        ("think", "<|im_start|>assistant\n<think>\n", "<think>\na\n</think>b", "a", "b"),
        ("think", "<|im_start|>assistant\n<think>\n", "cut of", "cut of", ""),
        ("think", "assistant\n<think>\n\n</think>\n\n", "b", "", "b"),
        ("think", "user: what is <think>? assistant:", "A tag.", "", "A tag."),
        ("think", "", "<thi", "", "<thi"),
        ("think", "", "<think>\n</think>\n\nb", "", "b"),
        ("deepseek_r1", "", "a</think>b", "a", "b"),
        ("deepseek_r1", "", "<think>a</think>b", "a", "b"),
        ("deepseek_r1", "<think></think>", "b", "", "b"),
        ("mistral", "[/INST]", "[THINK]a[/THINK]b", "a", "b"),
        ("mistral", "[/INST]", "b [THINK]a[/THINK]c", "a", "b c"),
        ("mistral", "[/INST]", "<think>\na\n</think>\nb", "a", "b"),
    ],
)
def test_reasoning(reasoning: str, prompt: str, text: str, thought: str, content: str) -> None:
    got = answer(text, None, reasoning, prompt)
    assert (got.reasoning, got.content) == (thought, content)


def test_calls_are_not_read_in_reasoning() -> None:
    call = '<tool_call>{"name": "clock"}</tool_call>'
    got = answer(f"<think>Maybe {call}?</think>{call}", "hermes", "think")
    assert got.reasoning == f"Maybe {call}?"
    assert calls(got) == [("clock", "{}")]
    marker = "[TOOL_CALLS]clock[ARGS]{}"
    got = answer(f"[THINK]{marker} or so[/THINK]{marker}", "mistral", "mistral")
    assert (got.reasoning, calls(got)) == (f"{marker} or so", [("clock", "{}")])


def test_a_whole_call_ends_reasoning_that_was_left_open() -> None:
    call = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    got = answer(f"Look.\n{call}", "qwen3_coder", "think", "<think>\n")
    assert (got.reasoning, got.content, calls(got)) == ("Look.", "", [("clock", "{}")])
    got = answer("A <tool_call> would do.\n</think>\nNo.", "qwen3_coder", "think", "<think>\n")
    assert (got.reasoning, got.content, calls(got)) == ("A <tool_call> would do.", "No.", [])


def test_nesting_has_a_bound() -> None:
    deep = '{"a":' * 5000
    text = f'<tool_call>{{"name": "clock", "arguments": {deep}'
    assert answer(text).content == text
    value = "[" * 150 + "]" * 150
    got = answer(f'<tool_call>{{"name": "set", "arguments": {{"items": {value}}}}}</tool_call>')
    assert calls(got) == [("set", f'{{"items": {value}}}')]
    python = "[clock(a=" + "[" * 5000 + "]" * 5000 + ")]"
    assert answer(python, "pythonic").content == python


def test_long_arguments_take_linear_time() -> None:
    value = json.dumps({"text": "line\n" * 100_000})
    interpreter = Interpreter(tool_parser=TOOL_PARSERS.entries("hermes")[0])
    text = f'<tool_call>{{"name": "set", "arguments": {value}}}</tool_call>'
    events = [
        event
        for place in range(0, len(text), 4)
        for event in interpreter.feed(text[place : place + 4])
    ]
    assert collect([*events, *interpreter.finish()]).calls[0].arguments == value


def test_ids() -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>' * 2
    first, second = answer(text).calls
    assert re.fullmatch("call_[A-Za-z0-9]{24}", first.id)
    assert first.id != second.id
    assert re.fullmatch(
        "[A-Za-z0-9]{9}", answer("[TOOL_CALLS]clock[ARGS]{}", "mistral").calls[0].id
    )
    named = answer("[TOOL_CALLS]clock[CALL_ID]abc123XYZ[ARGS]{}", "mistral")
    assert named.calls[0].id == "abc123XYZ"
