"""Merges derived from scores: the short list gives what the full list gives."""

import itertools

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.models import BPE

from headrace.text.merges import merges_from_scores

LETTERS = "abc"
PIECES = st.lists(st.text(alphabet=LETTERS, min_size=2, max_size=5), unique=True, max_size=14)


def all_pairs(tokens):
    """Every way to cut every piece, best first: the definition."""
    return [
        (piece[:cut], piece[cut:])
        for piece in tokens
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in tokens and piece[cut:] in tokens
    ]


def split(tokens, merges, text):
    model = BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    return tokenizers.Tokenizer(model).encode(text).tokens


@given(pieces=PIECES, shuffled=st.randoms(), text=st.text(alphabet=LETTERS, max_size=24))
def test_pairs_left_out_never_happen(pieces, shuffled, text):
    """In any order of pieces, whole before parts included."""
    tokens = [*LETTERS, *pieces]
    shuffled.shuffle(tokens)
    merges = merges_from_scores(tokens, range(len(tokens)))
    assert set(merges) <= set(all_pairs(tokens))
    assert split(tokens, merges, text) == split(tokens, all_pairs(tokens), text)


@given(pieces=PIECES)
def test_one_pair_for_each_piece_that_can_be_made(pieces):
    tokens = [*LETTERS, *pieces]
    merges = merges_from_scores(tokens, range(len(tokens)))
    wholes = ["".join(pair) for pair in merges]
    assert len(set(wholes)) == len(wholes)
    reached = {piece for piece in pieces if split(tokens, all_pairs(tokens), piece) == [piece]}
    assert reached <= set(wholes)


def test_the_better_score_decides_between_two_cuts():
    tokens = ["a", "b", "c", "bc", "ab", "abc"]
    for best_first, expected in (
        ([0, 1, 2, 3, 4, 5], [("b", "c"), ("a", "b"), ("a", "bc")]),
        ([0, 1, 2, 4, 3, 5], [("a", "b"), ("b", "c"), ("ab", "c")]),
    ):
        assert merges_from_scores(tokens, best_first) == expected


def test_pieces_that_may_not_be_made_take_no_part():
    tokens = ["a", "b", "ab"]
    assert merges_from_scores(tokens, [0, 1]) == []
    assert list(itertools.chain(*merges_from_scores(tokens, [0, 1, 2]))) == ["a", "b"]
