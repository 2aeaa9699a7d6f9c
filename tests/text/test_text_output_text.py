"""Visible text of a sequence: detokeniser and stop strings together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import SENTENCES, byte_level

from headrace.text.output_text import OutputText

TOKENIZER = byte_level()
TEXT = st.one_of(st.text(max_size=30), st.sampled_from(SENTENCES))


def run(ids, **options):
    output = OutputText(TOKENIZER, **options)
    joined = "".join(output.push(token_id) for token_id in ids) + output.finish()
    assert joined == output.text
    return joined, output.stopped


@given(text=TEXT, data=st.data(), include_stop=st.booleans())
def test_the_text_ends_at_a_stop_taken_from_it(text, data, include_stop):
    """Stops cross token borders here, and characters made of several tokens."""
    start = data.draw(st.integers(0, len(text)))
    stop = text[start : start + data.draw(st.integers(1, 8))]
    stops = (stop,) if stop else ()
    shown, stopped = run(TOKENIZER.encode(text), stops=stops, include_stop=include_stop)
    if not stop:
        assert (shown, stopped) == (text, None)
    else:
        end = text.index(stop) + (len(stop) if include_stop else 0)
        assert (shown, stopped) == (text[:end], stop)


@given(ids=st.lists(st.integers(0, 400), max_size=30), stop=st.text(min_size=1, max_size=3))
def test_any_ids_give_their_decoding_cut_at_the_stop(ids, stop):
    shown, stopped = run(ids, stops=(stop,))
    whole = TOKENIZER.decode(ids)
    assert shown == whole.partition(stop)[0]
    assert (stopped == stop) == (stop in whole)


def test_a_stop_that_never_completes_hides_nothing():
    text = "The capital of France"
    assert run(TOKENIZER.encode(text), stops=("FranceZZ",)) == (text, None)


def test_a_stop_inside_an_emoji_sequence():
    ids = TOKENIZER.encode("a 👨‍👩‍👧 b")
    assert run(ids, stops=("👩",)) == ("a 👨\u200d", "👩")


def test_a_stop_of_broken_text_is_seen_at_the_end():
    ids = TOKENIZER.encode("ok 🙂")[:-1]
    assert run(ids, stops=("\ufffd",)) == ("ok ", "\ufffd")


def test_stops_are_not_looked_for_in_the_first_tokens():
    ids = TOKENIZER.encode("a b a b")
    first_b = len(TOKENIZER.encode("a b"))
    assert run(ids, stops=("b",)) == ("a ", "b")
    assert run(ids, stops=("b",), min_tokens=first_b) == ("a b a ", "b")
    assert run(ids, stops=("b",), min_tokens=len(ids)) == ("a b a b", None)


def test_nothing_is_shown_after_the_stop():
    output = OutputText(TOKENIZER, stops=("x",))
    for token_id in TOKENIZER.encode("axb"):
        output.push(token_id)
    assert output.push(TOKENIZER.encode("c")[0]) == ""
    assert output.finish() == ""
    assert output.text == "a"


def test_special_tokens_follow_the_option():
    ids = [*TOKENIZER.encode("a"), 1]
    assert run(ids)[0] == "a"
    assert run(ids, skip_special_tokens=False)[0] == "a</s>"


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_that_is_a_special_token_stops_shown_or_not(skip):
    """vLLM#2123, koboldcpp#791: it is no text where special tokens are left out."""
    ids = [*TOKENIZER.encode("ab"), 1, *TOKENIZER.encode("cd")]
    options = {"skip_special_tokens": skip, "stops": ("bx", "</s>")}  # b is held back for bx
    assert run(ids, **options) == ("ab", "</s>")
    assert run(ids, **options, include_stop=True) == ("ab</s>", "</s>")
    assert run(ids, **options, min_tokens=2) == ("ab", "</s>")
    late = run([*ids, 1], **options, min_tokens=3)
    assert late == ("abcd" if skip else "ab</s>cd", "</s>")
    half = [TOKENIZER.encode("𐎀")[0], 1]  # of a character of several tokens
    assert run(half, **options) == ("\ufffd", "</s>")
    assert run(half, skip_special_tokens=skip, stops=("\ufffd", "</s>")) == ("", "\ufffd")
