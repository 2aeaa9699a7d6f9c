"""Stop strings: streaming equals one cut of the whole text, whatever the chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.stop_matcher import StopMatcher

LETTERS = st.text(alphabet="abé🙂", min_size=0, max_size=30)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), min_size=0, max_size=4)


def cut(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The definition: the first end of any stop string in the text, the longest one there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(
    chunks=st.lists(st.text(alphabet="abé🙂", max_size=6), max_size=8),
    stops=STOPS,
    include_stop=st.booleans(),
)
def test_streaming_equals_the_cut_of_the_whole_text(chunks, stops, include_stop):
    matcher = StopMatcher(tuple(stops), include_stop)
    expected, stop = cut("".join(chunks), stops, include_stop)
    shown = ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        assert expected.startswith(shown)
    shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, stop)


@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_may_still_become_a_stop(text, stops):
    matcher = StopMatcher(tuple(stops))
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "chunks", "shown", "matched"),
    [
        (("END",), ["some E", "N", "D of it"], "some ", "END"),
        (("END",), ["some EN", "EEND"], "some ENE", "END"),
        (("abc", "b"), ["xab", "c"], "xa", "b"),  # completed first
        (("bc", "abc"), ["xabc"], "x", "abc"),  # completed together: the longer
        (("aab",), ["aaaab"], "aa", "aab"),
        (("ab", "abab"), ["abab"], "", "ab"),
    ],
)
def test_which_match_wins(stops, chunks, shown, matched):
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.push, chunks)) + matcher.flush() == shown
    assert matcher.matched == matched


def test_a_prefix_that_never_completes_comes_at_the_end():
    matcher = StopMatcher(("wordZZ",))
    assert matcher.push("a word") == "a "
    assert matcher.flush() == "word"
    assert matcher.matched is None


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(("x",), include_stop=True)
    assert matcher.push("axb") == "ax"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
