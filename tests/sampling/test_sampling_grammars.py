"""Regular expressions, EBNF, choices and structural tags; the mask of one sequence; UTF-8."""

import json
import re
from typing import Any

import pytest
import torch
from grammar_walks import END, PIECES, VOCAB, accepts, allowed, backend, form, mask_of, walk

from headrace.base.errors import RequestError
from headrace.request.structured_output import StructuredOutput
from headrace.sampling import grammar
from headrace.sampling.bad_words import BadWords
from headrace.sampling.grammar_xgrammar import checked_form
from headrace.sampling.host_mask import allowed_line, together
from headrace.sampling.json_text_masks import JsonPlace, place_after
from headrace.sampling.regex_text import checked_regex

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
ENDLESS = 'root ::= "a" root | "b"'


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
    with pytest.raises(RequestError, match="structural_tag"):
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
    assert len(compiler._shown) == 1  # by what is shown, not by what is named


# ---- the mask of one sequence


def test_special_and_unused_ids_are_never_text(compiler) -> None:
    mask = mask_of(compiler.compile(form(regex="[^a]*")))
    ids = allowed(mask, [])
    assert END in ids
    assert 256 not in ids
    assert max(ids) < len(PIECES)
    assert ord("a") not in ids


def test_stop_ids_stand_at_the_end_only(compiler) -> None:
    compiled = compiler.compile(form(regex="ab?c?"))
    mask = mask_of(compiled, frozenset({ord("b"), END}))
    assert allowed(mask, []) == [ord("a")]
    assert allowed(mask, [ord("a")]) == [ord("b"), ord("c"), END]
    inner = mask_of(compiler.compile(form(regex="a(b|x)c")), frozenset({ord("b")}))
    assert allowed(inner, [ord("a")]) == [ord("x")]
    assert allowed(inner, [ord("a"), ord("x"), ord("c")]) == [ord("b")]


def test_min_tokens_hold_until_the_grammar_ends(compiler) -> None:
    mask = mask_of(compiler.compile(form(regex="a{1,3}")), min_tokens=9)
    a = ord("a")
    assert allowed(mask, [a]) == [a]
    assert allowed(mask, [a, a]) == [a]
    assert allowed(mask, [a, a, a]) == [END]
    later = mask_of(compiler.compile(form(regex="a{1,3}")), min_tokens=2)
    assert [allowed(later, [a] * count) for count in (1, 2)] == [[a], [a, END]]


def test_a_mask_follows_the_output_from_anywhere(compiler) -> None:
    compiled = compiler.compile(form(regex="abcd"))
    output = [ord(letter) for letter in "abc"]
    step_by_step, at_once = mask_of(compiled), mask_of(compiled)
    for made in range(3):
        assert allowed(step_by_step, output[:made]) == [output[made]]
    assert allowed(at_once, output) == allowed(step_by_step, output) == [ord("d")]


def test_a_token_that_cannot_follow_fails_its_sequence_alone(compiler) -> None:
    mask = mask_of(compiler.compile(form(regex="ab")))
    assert allowed(mask, [ord("x")]) == []
    assert f"Token {ord('x')}" in mask.failure


def test_a_dead_end_is_told(compiler) -> None:
    mask = mask_of(compiler.compile(form(grammar='root ::= "a" x\nx ::= "b" x')))
    output = [ord("a")]
    assert allowed(mask, output) in ([ord("b")], [])
    nothing = mask_of(_Stuck())
    assert allowed(nothing, []) == []
    assert "can continue" in nothing.failure


class _Stuck:
    """A grammar that raises, is slow or leads nowhere."""

    size_bytes, is_complete = 1, False

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def matcher(self) -> "_Stuck":
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def allowed(self, line: torch.Tensor) -> None:
        if self._error is not None:
            raise self._error
        line.zero_()


def test_a_library_that_raises_fails_its_sequence_alone(caplog) -> None:
    mask = mask_of(_Stuck(RuntimeError("inside")))
    assert allowed(mask, []) == []
    assert "RuntimeError: inside" in mask.failure


@pytest.mark.parametrize("limit", ["MASK_SECONDS", "ALL_MASKS_SECONDS"])
def test_a_slow_mask_ends_its_sequence(
    compiler, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    mask = mask_of(compiler.compile(form(regex="a*")))
    assert allowed(mask, [])
    monkeypatch.setattr(grammar, limit, 0.0)
    assert allowed(mask, []) == []
    assert "too ambiguous" in mask.failure


def test_masks_together(compiler) -> None:
    a, b, c = (ord(letter) for letter in "abc")
    words = BadWords([[b], [a, c]])
    mask = together(mask_of(compiler.compile(form(regex="a?[abc]*"))), words)
    assert mask is not None
    assert (mask.needs_last_token, mask.failure) == (True, "")
    assert mask.is_ready()
    assert allowed(mask, []) == [a, c, END]
    assert {b, c}.isdisjoint(allowed(mask, [a]))
    assert together(None, words) is words
    assert together(None, None) is None


def test_answers_are_valid_utf8(compiler) -> None:
    mask = mask_of(compiler.compile(form(regex="[^x]*")))
    assert 0xC0 not in allowed(mask, [])
    for lead, low, high in [
        (0xE0, 0xA0, 0xBF),
        (0xED, 0x80, 0x9F),
        (0xF0, 0x90, 0xBF),
        (0xF4, 0x80, 0x8F),
        (0xE1, 0x80, 0xBF),
    ]:
        fresh = mask_of(compiler.compile(form(regex="[^x]*")))
        ids = [token for token in allowed(fresh, [lead]) if token < 256]
        assert (min(ids), max(ids)) == (low, high)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[1]\n", JsonPlace.OUTSIDE),
        ('{"a', JsonPlace.STRING),
        ('{"a\\', JsonPlace.ESCAPE),
        ('"a\\"', JsonPlace.STRING),
        ('"a\\\\"', JsonPlace.OUTSIDE),
        ('"a"\n', JsonPlace.OUTSIDE),
        ('"a\n', None),
        ('"a\\\n', None),
    ],
)
def test_where_a_json_text_stands(text: str, place: JsonPlace | None) -> None:
    assert place_after(JsonPlace.OUTSIDE, text.encode()) is place


def test_bits_stand_for_tokens() -> None:
    class Some:
        def narrow(self, output_ids: Any, line: torch.Tensor) -> None:
            line &= torch.tensor([0x40000001, *[0] * (len(line) - 1)], dtype=torch.int32)

    line = allowed_line(Some(), [], VOCAB)  # type: ignore[arg-type]
    assert line.shape == (-(-VOCAB // 32),)
    assert line.tolist() == [0x40000001, *[0] * (len(line) - 1)]


def test_a_form_is_the_same_as_its_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutput(json_schema=schema) == StructuredOutput(json_schema=json.dumps(schema))
    other = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert StructuredOutput(json_schema=schema) != StructuredOutput(json_schema=other)
