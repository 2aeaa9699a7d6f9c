"""Regular expressions, EBNF, choices and structural tags."""

import json
import re
from typing import Any

import pytest
from grammar_walks import accepts, allowed, backend, form, mask_of, walk

from headrace.base.errors import RequestError
from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.regex_text import checked_regex
from headrace.sampling.grammar.xgrammar_backend import checked_form

EXPRESSIONS = [
    "abc",
    "[a-c]{2,4}x?",
    "(?:ab|cd)+",
    "^a|b$",
    "\\d{3}-\\w+",
    "[^a-z]\\s",
    "\\D\\S\\W{1,3}",
    ".{2}!",
    "[.\\]\\-x]+",
    "\\.\\*\\/",
    "a{0}b",
    "é+[à-ü]😀?",
    "\\x41\\u00e9\\t",
    "(a|)b",
    "a+?b*?",
    "[\\w.]{1,3}@",
    "[\\s,]{2}[^\\s]",
    "]}",
]
NOT_EXPRESSIONS = {
    "(": "not closed",
    "[a": "ends in the middle",
    "a\\": "ends in the middle",
    "a)": "Unmatched",
    "*": "Expect element",
    "a{3,2}": "Lower bound",
    "a{x}": "repetition count",
    "(?=a)b": "look-around",
    "(?<=a)b": "look-around",
    "(?i)a": "flags",
    "(a)\\1": "'\\1' is not supported",
    "\\bab": "'\\b' is not supported",
    "\\Aab\\Z": "'\\A' is not supported",
    "\\p{L}": "'\\p' is not supported",
    "a^b": "no answer begins",
    "(a$|b)c": "no answer ends",
    "[[:alpha:]]": "sets of classes",
    "[a&&b]": "sets of classes",
    "[a\\S]": "within a class",
    "(" * 101 + "a" + ")" * 101: "more than 100 groups",
    "a" * 8193: "more than 8192 characters",
}


@pytest.fixture(scope="module")
def compiler():
    return backend()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_answers_match_the_expression(compiler, expression: str) -> None:
    compiled = compiler.compile(form(regex=expression))
    for seed in range(16):
        answer = walk(compiled, seed)
        assert answer is not None
        assert re.fullmatch(expression, answer.decode(), re.ASCII)


@pytest.mark.parametrize("expression", NOT_EXPRESSIONS)
def test_what_is_no_expression_is_refused(compiler, expression: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(form(regex=expression))
    assert NOT_EXPRESSIONS[expression] in str(caught.value)


def test_a_dot_is_no_line_break() -> None:
    assert checked_regex("a.[.]\\.") == "a[^\\n][.]\\."
    assert checked_regex("a.", in_json=True) == "a."


@pytest.mark.parametrize(
    ("text", "answers", "others"),
    [
        ('root ::= "x" root "y" | "z"', ["z", "xxzyy"], ["xz", "xxzy", ""]),
        ('root ::= item ("," item)*\nitem ::= [a-c]+', ["a", "ab,c"], ["a,", ",a", "d"]),
        ('root ::= root "+" root | [0-9]', ["1", "1+2+3"], ["1+", "+"]),
        ('# a comment\nroot ::= "é" | "\\"\\n"', ["é", '"\n'], ["e", '"']),
    ],
)
def test_grammars(compiler, text: str, answers: list[str], others: list[str]) -> None:
    compiled = compiler.compile(form(grammar=text))
    assert [accepts(compiled, answer) for answer in answers] == [True] * len(answers)
    assert [accepts(compiled, other) for other in others] == [False] * len(others)


@pytest.mark.parametrize("text", ["x", "root := 1", 'start ::= "a"', 'root ::= "a', "root ::= b"])
def test_what_is_no_grammar_is_refused(compiler, text: str) -> None:
    with pytest.raises(RequestError, match="is not a grammar"):
        compiler.compile(form(grammar=text))


def test_what_describes_no_answer_is_refused(compiler) -> None:
    with pytest.raises(RequestError, match="describes no answer"):
        compiler.compile(form(grammar="root ::= root"))
    compiler.compile(form(grammar='root ::= "a" root'))  # it begins; its length ends it


def test_choices(compiler) -> None:
    choices = ["yes", "no", "yes, please", 'a"b\\c\n\t', "[é]😀 |", "root ::= x"]
    compiled = compiler.compile(form(choice=choices))
    assert all(accepts(compiled, choice) for choice in choices)
    assert not any(accepts(compiled, other) for other in ["", "ye", "yes,", "noo", "root"])
    drawn = {walk(compiled, seed) for seed in range(60)}
    assert drawn == {choice.encode() for choice in choices}


def test_structural_tags(compiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    form_of = {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]},
    }
    compiled = compiler.compile(form(structural_tag=form_of))
    assert accepts(compiled, 'So: <f>{"a": 5}</f> and so on')
    assert not accepts(compiled, "So: <f>none</f>")
    schema["properties"] = {"a": {"type": "string", "maxLength": 2}}
    bounded = compiler.compile(form(structural_tag=form_of))
    assert accepts(bounded, '<f>{"a": "xy"}</f>')
    assert not accepts(bounded, '<f>{"a": "\n"}</f>')
    schema["properties"] = {"a": {"type": "string", "maxLength": 500}}
    with pytest.raises(RequestError, match="lengths go up to 128"):
        compiler.compile(form(structural_tag=form_of))
    schema["not"] = {}
    with pytest.raises(RequestError, match="not is not supported"):
        compiler.compile(form(structural_tag=form_of))
    with pytest.raises(RequestError, match=r"is not a grammar\. Invalid structural tag"):
        compiler.compile(form(structural_tag={"type": "nothing"}))
    deep: Any = {}
    for _ in range(200):
        deep = {"format": deep}
    with pytest.raises(RequestError, match="levels"):
        compiler.compile(form(structural_tag=deep))


def test_json_in_a_tag_cannot_fill_up_with_blanks(compiler) -> None:
    part = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {}}}}
    compiled = compiler.compile(form(structural_tag={"type": "structural_tag", "format": part}))
    assert accepts(compiled, '{ "a" : null }')
    assert not accepts(compiled, '{  "a": null}')
    part["max_whitespace_cnt"] = 3  # asked for
    compiled = compiler.compile(form(structural_tag={"type": "structural_tag", "format": part}))
    assert accepts(compiled, '{  "a": null}')


def test_a_refusal_says_in_which_tag_the_schema_stands() -> None:
    schemas = {"f": {"type": "object"}, "g": {"type": "object", "properties": {"a": {"not": {}}}}}
    tags = [
        {
            "type": "tag",
            "begin": f"<{name}>",
            "content": {"type": "json_schema", "json_schema": each},
        }
        for name, each in schemas.items()
    ]
    tag = {"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": tags}}
    with pytest.raises(RequestError, match=r"In the tag '<g>' at #/properties/a: not is not supp"):
        checked_form(form(structural_tag=tag))


def test_special_tokens_that_a_tag_names(compiler) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "<s>"},
                {"type": "regex", "pattern": "[a-z]{1,2}</s>"},
            ],
        },
    }
    start = mask_of(compiler.compile(form(structural_tag=tag)))
    assert allowed(start, []) == [ord("<")]
    shown = compiler.compile(form(structural_tag=tag, special_tokens=["<s>", "</s>", "<none>"]))
    mask = mask_of(shown)
    assert allowed(mask, []) == [ord("<"), 256]
    assert allowed(mask, [256]) == list(range(ord("a"), ord("z") + 1))
    assert allowed(mask, [256, ord("a"), ord("b")]) == [ord("<")]  # it ends the answer: never text
    assert accepts(shown, "<s>ab</s>")
    tag["format"] = {"type": "const_string", "value": "<special>"}
    plain = compiler.compile(form(structural_tag=tag, special_tokens=["<s>"]))
    assert allowed(mask_of(plain), []) == [ord("<")]  # named, and not in the tag


def test_vocabularies_with_special_tokens_are_few(compiler) -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "<s>"}}
    for names in (["<s>"], ["<s>", "x"], ["x"], []):
        compiler.compile(form(structural_tag=tag, special_tokens=names))
    shown = set(compiler._vocabularies)  # by what is shown, not by what is named
    assert shown == {frozenset(), frozenset({256})}


def test_a_form_is_the_same_as_its_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutput(json_schema=schema) == StructuredOutput(json_schema=json.dumps(schema))
    other = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert StructuredOutput(json_schema=schema) != StructuredOutput(json_schema=other)
