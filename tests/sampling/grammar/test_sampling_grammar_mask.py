"""The mask of one sequence: endings, failures, valid UTF-8."""

from typing import Any

import pytest
import torch
from grammar_walks import END, PIECES, VOCAB, allowed, backend, form, mask_of

from headrace.sampling.bad_words import BadWords
from headrace.sampling.grammar import mask as grammar_mask
from headrace.sampling.grammar.json_text_masks import JsonPlace, place_after
from headrace.sampling.host_mask import allowed_line, together


@pytest.fixture(scope="module")
def compiler():
    return backend()


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
    monkeypatch.setattr(grammar_mask, limit, 0.0)
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
