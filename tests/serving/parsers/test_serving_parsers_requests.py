"""Tools of a request, what holds a model to them, and the choice of parsers."""

import json
from typing import Any

import pytest

from headrace.base.errors import RequestError, UnsupportedError
from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.structural_tag import checked_structural_tag
from headrace.serving.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Interpreter,
    Reading,
    ToolRequest,
    choose_reasoning_parser,
    choose_tool_parser,
    collect,
)

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: Any = "weather", parameters: Any = WEATHER, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


CLOCK = tool("clock", {"type": "object", "properties": {}, "additionalProperties": False})
NAMED = {"type": "function", "function": {"name": "clock"}}
TOOLS = [tool(), CLOCK]


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "begins", "says"),
    [
        ([], None, None, "tools is []", "at least one"),
        ({}, None, None, "tools is {}", "a list"),
        ("x", None, None, "tools is 'x'", "a list"),
        ([1], None, None, "tools[0] is 1", "function"),
        ([{"type": "web"}], None, None, "tools[0] is", "function"),
        ([{"type": "function"}], None, None, "tools[0].function is None", "name"),
        ([tool("")], None, None, "tools[0].function.name is ''", "64"),
        ([tool("a b")], None, None, "tools[0].function.name is 'a b'", "64"),
        ([tool("x" * 65)], None, None, "tools[0].function.name is", "64"),
        ([tool(None)], None, None, "tools[0].function.name is None", "64"),
        ([CLOCK, tool(parameters=[])], None, None, "tools[1].function.parameters is []", "schema"),
        ([tool(parameters={"type": "string"})], None, None, "tools[0].function.param", "object"),
        ([tool(parameters={"properties": 1})], None, None, "tools[0].function.param", "schema"),
        ([tool(strict="yes")], None, None, "tools[0].function.strict is 'yes'", "true"),
        ([tool(description=1)], None, None, "tools[0].function.description is 1", "string"),
        ([CLOCK, CLOCK], None, None, "tools is 'clock'", "once"),
        ([CLOCK] * 600, None, None, "tools has 600", "512"),
        (None, "auto", None, "tool_choice is 'auto'", "no tools"),
        (None, NAMED, None, "tool_choice is", "no tools"),
        ([CLOCK], "any", None, "tool_choice is 'any'", "required"),
        ([CLOCK], 3, None, "tool_choice is 3", "required"),
        ([CLOCK], {"type": "function"}, None, "tool_choice is", "name"),
        ([tool()], NAMED, None, "tool_choice is 'clock'", "weather"),
        ([CLOCK], {**NAMED, "type": "x"}, None, "tool_choice is", "name"),
        ([CLOCK], None, "no", "parallel_tool_calls is 'no'", "true or false"),
    ],
)
def test_bad_requests(tools: Any, choice: Any, parallel: Any, begins: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        ToolRequest.of(tools, choice, parallel)
    assert str(caught.value).startswith(begins)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_good_requests() -> None:
    assert ToolRequest.of(None) is None
    assert ToolRequest.of(None, "none", True) is None
    request = ToolRequest.of([tool(), {"type": "function", "function": {"name": "now"}}])
    assert request is not None
    assert (request.choice, request.only, request.parallel) == ("auto", None, True)
    assert request.schemas == {"weather": WEATHER, "now": {"type": "object"}}
    named = ToolRequest.of([tool(), CLOCK], NAMED, False)
    assert named is not None
    assert (named.choice, named.only, named.parallel) == ("required", "clock", False)
    assert [each.name for each in named.callable_tools] == ["clock"]


def reading(
    family: str, choice: Any = None, parallel: bool = True, *, strict: bool = False,
    reasoning: str = "none", prompt: str = "",
) -> Reading:  # fmt: skip
    request = ToolRequest.of([tool(strict=strict), CLOCK], choice, parallel)
    return Reading.of(
        tool_parser=family, reasoning_parser=reasoning, request=request, prompt=prompt
    )


@pytest.fixture(scope="module")
def accepts() -> Any:
    """Whether the grammar engine lets an answer stand: "ends", "goes on", or "no"."""
    xgrammar = pytest.importorskip("xgrammar")
    tokens = [bytes([value]) for value in range(256)] + [b""]
    vocabulary = xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(vocabulary)

    def check(constraint: dict[str, Any], text: str) -> str:
        checked = checked_structural_tag(StructuredOutput(structural_tag=constraint).text)
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(checked))
        if not all(matcher.accept_token(value) for value in text.encode()):
            return "no"
        return "ends" if matcher.accept_token(256) else "goes on"

    return check


ONE = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "clock", "parameters": {}}',
    "mistral": "[TOOL_CALLS]clock[ARGS]{}",
    "mistral_v3": '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
    "qwen3_coder": "<tool_call>\n<function=clock>\n\n</function>\n</tool_call>",
}
OTHER = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "mistral_v3": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call>",
}


@pytest.mark.parametrize("family", ONE)
def test_required_calls(family: str, accepts: Any) -> None:
    """What the grammar admits is what the parser reads, for every family."""
    form = TOOL_PARSERS.entries(family)[0].form
    assert form is not None
    one, both = ONE[family], OTHER[family] + form.separator + ONE[family]
    constraint = reading(family, "required").constraint
    assert constraint is not None
    assert accepts(constraint, one) == accepts(constraint, both) == "ends"
    assert accepts(constraint, "") == "goes on"
    assert accepts(constraint, "Hello") == "no"
    assert accepts(constraint, OTHER[family].replace("city", "town")) == "no"
    assert accepts(constraint, one.replace("clock", "rm")) == "no"
    interpreter = reading(family, "required").interpreter()
    got = collect([*interpreter.feed(both), *interpreter.finish()])
    calls = [(call.name, json.loads(call.arguments)) for call in got.calls]
    assert calls == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert got.content == ""


@pytest.mark.parametrize("family", ONE)
def test_one_call_at_most(family: str, accepts: Any) -> None:
    form = TOOL_PARSERS.entries(family)[0].form
    assert form is not None
    for constraint in (
        reading(family, "required", False).constraint,
        reading(family, NAMED).constraint,
    ):
        assert constraint is not None
        assert accepts(constraint, ONE[family]) == "ends"
        assert accepts(constraint, ONE[family] + form.separator + ONE[family]) == "no"
    assert accepts(constraint, OTHER[family]) == "no"  # another tool than the one named
    interpreter = reading(family, "auto", False).interpreter()
    got = collect(
        [*interpreter.feed(ONE[family] + form.separator + ONE[family]), *interpreter.finish()]
    )
    assert len(got.calls) == 1


@pytest.mark.parametrize("family", ["hermes", "mistral", "qwen3_coder"])
def test_free_text_with_strict_calls(family: str, accepts: Any) -> None:
    constraint = reading(family, strict=True).constraint
    assert constraint is not None
    assert accepts(constraint, "Hello") == "ends"
    assert accepts(constraint, f"Hello {OTHER[family]}\n{ONE[family]} bye") == "ends"
    assert accepts(constraint, f"Hello {OTHER[family].replace('city', 'town')}") == "no"
    single = reading(family, parallel=False).constraint
    assert single is not None
    assert accepts(single, f"Hello {ONE[family]}") == "ends"
    assert accepts(single, f"{ONE[family]}\n{ONE[family]}") == "no"


def test_free_choice_needs_no_constraint() -> None:
    for family in ONE:
        assert reading(family).constraint is None
        assert reading(family, "none", strict=True).constraint is None
    assert reading("llama3_json", strict=True).constraint is None  # no text tells a call from JSON
    assert Reading.of(
        tool_parser="none", reasoning_parser="none", request=None, prompt=""
    ).constraint is None  # fmt: skip


def test_reasoning_stays_free_before_required_calls(accepts: Any) -> None:
    def constraint(prompt: str) -> dict[str, Any]:
        got = reading("hermes", "required", reasoning="think", prompt=prompt).constraint
        assert got is not None
        return got

    call, thought = ONE["hermes"], "Which? <tool_call>, so.\n</think>\n\n"
    is_open = constraint("assistant\n<think>\n")
    assert accepts(is_open, thought + call) == "ends"
    assert accepts(is_open, call) == "goes on"  # still reasoning
    undecided = constraint("assistant\n")
    assert accepts(undecided, "<think>\n" + thought + call) == accepts(undecided, call) == "ends"
    assert accepts(undecided, "Hello") == "no"
    closed = constraint("assistant\n<think>\n\n</think>\n\n")
    assert accepts(closed, call) == "ends"
    assert accepts(closed, "<think>") == "no"


def test_choice_none_reads_no_calls() -> None:
    got = reading("hermes", "none")
    interpreter = got.interpreter()
    answer = collect([*interpreter.feed(ONE["hermes"]), *interpreter.finish()])
    assert (answer.content, answer.calls) == (ONE["hermes"], ())
    assert got.markers == ()


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"hermes.*tool_choice none"):
        reading("none")
    assert reading("none", "none").tool_parser is None
    with pytest.raises(UnsupportedError, match="tool_choice auto"):
        reading("pythonic", "required")
    with pytest.raises(UnsupportedError, match=r"Known: .*hermes"):
        choose_tool_parser("nosuch", model_type="x", template=None)
    with pytest.raises(UnsupportedError, match=r"Known: .*deepseek"):
        choose_reasoning_parser("nosuch", model_type="x", template=None)


def test_markers_that_may_be_special_tokens() -> None:
    assert reading("mistral").markers == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert reading("hermes", "none", reasoning="think").markers == ("<think>", "</think>")
    assert reading("hermes", reasoning="think").markers == (
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
    )


def test_where_a_continued_message_stands() -> None:
    parser = REASONING_PARSERS.entries("think")[-1]
    assert parser.end_awaited(parser.marker_before("<think>\nI wonder")) == "</think>"
    assert parser.end_awaited(parser.marker_before("<think>\nI wonder\n</think>\nSo")) == ""
    opened = REASONING_PARSERS.entries("deepseek_r1")[-1]
    assert opened.end_awaited(opened.marker_before("So")) == ""  # content has begun


CITY = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def test_content_of_a_form_and_tools_that_may_be_called(accepts: Any) -> None:
    def constraint(tools: object, choice: object = None, prompt: str = "", **options: Any) -> Any:
        return Reading.of(
            tool_parser="hermes",
            reasoning_parser="think",
            request=ToolRequest.of(tools, choice, **options),
            prompt=prompt,
            content=CITY,
        ).constraint

    city, closed = '{"city": "Paris"}', "<think>\n\n</think>"
    either = constraint(TOOLS, prompt=closed)
    assert accepts(either, city) == accepts(either, ONE["hermes"].strip()) == "ends"
    assert accepts(either, "Hello") == accepts(either, city + ONE["hermes"].strip()) == "no"
    behind = constraint(TOOLS)
    assert accepts(behind, f"<think>Well</think>\n\n{city}") == accepts(behind, city) == "ends"
    only_calls = constraint(TOOLS, "required", closed)
    assert accepts(only_calls, ONE["hermes"].strip()) == "ends"
    assert accepts(only_calls, city) == "no"
    assert constraint(TOOLS, "none", closed) is None  # the form of the content is all there is
    assert accepts(constraint(None), f"<think>Well</think>\n\n{city}") == "ends"
    with pytest.raises(UnsupportedError, match="response_format goes with tools"):
        Reading.of(
            tool_parser="pythonic",
            reasoning_parser="none",
            request=ToolRequest.of(TOOLS),
            prompt="",
            content=CITY,
        )


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, "none", "none"),
        ("{{ messages }}<|im_end|>", "none", "none"),
        ('<tool_call>\n{"name": "x", "arguments": <think>\n\n</think>', "hermes", "think"),
        ("<tool_call>\n<function=example><parameter=a> {'<think>\\n'}", "qwen3_coder", "think"),
        ('<|start_header_id|>ipython "parameters": ', "llama3_json", "none"),
        ('"[TOOL_CALLS] [" + ', "mistral_v3", "none"),
        ("[TOOL_CALLS]' + name + '[ARGS]' [THINK]", "mistral", "mistral"),
        ("<tool_call>{name}<arg_key> arguments <think>", "none", "think"),
        ("content.split('</think>')", "none", "deepseek_r1"),
    ],
)
def test_automatic_choice(template: str | None, tools: str, reasoning: str) -> None:
    decision = choose_tool_parser("auto", model_type="some_model", template=template)
    assert (decision.value, decision.asked) == (tools, False)
    assert "some_model" in decision.reason
    decision = choose_reasoning_parser("auto", model_type="some_model", template=template)
    assert decision.value == reasoning


def test_asked_for() -> None:
    decision = choose_tool_parser("hermes", model_type="llama", template="[TOOL_CALLS]")
    assert (decision.value, decision.asked) == ("hermes", True)
    assert choose_reasoning_parser("none", model_type="x", template="<think>").value == "none"


def test_interpreters_share_nothing() -> None:
    got = reading("hermes")
    first, second = got.interpreter(), got.interpreter()
    assert isinstance(first, Interpreter)
    first.feed("<tool_call>{")
    assert collect([*second.feed("a"), *second.finish()]).content == "a"
