"""Incremental text equals the decoding of all ids and never has half a character."""

import codecs

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import SENTENCES, byte_level, byte_level_backend, sentencepiece, tokenizer_of
from tokenizers import decoders, models

from headrace.text.detokenizer import Detokenizer

BYTE_LEVEL = byte_level()
LIBRARY = byte_level_backend()
WITH_PREFIX = sentencepiece()
WITHOUT_PREFIX = sentencepiece(add_space_prefix=False)
ANY_ID = st.one_of(st.integers(0, 384), st.integers(-2, 1000))
TEXT = st.one_of(st.text(max_size=20), st.sampled_from(SENTENCES))


def streamed(tokenizer, ids, prompt_ids=(), *, skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    return [*deltas, detokenizer.finish()]


@given(ids=st.lists(ANY_ID, max_size=30), skip=st.booleans())
def test_byte_level_stream_equals_the_library(ids, skip):
    known = [token_id for token_id in ids if 0 <= token_id < BYTE_LEVEL.vocab_size]
    expected = LIBRARY.decode(known, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == expected
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special_tokens=skip)) == expected


@given(raw=st.binary(max_size=24))
def test_invalid_utf8_streams_like_the_whole(raw):
    spelled = {piece: i for i in range(384) if len(piece := BYTE_LEVEL.pieces[i]) == 1}
    ids = [spelled[bytes([byte])] for byte in raw]
    assert "".join(streamed(BYTE_LEVEL, ids)) == raw.decode("utf-8", "replace")


@given(text=TEXT)
def test_valid_text_comes_in_whole_characters(text):
    deltas = streamed(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@given(text=TEXT, data=st.data())
def test_after_a_prompt_the_text_goes_on(text, data):
    """Wherever the ids are parted, a character cut there belongs to the output."""
    ids = BYTE_LEVEL.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    whole = codecs.getincrementaldecoder("utf-8")()
    before = whole.decode(b"".join(BYTE_LEVEL.pieces[i] for i in ids[:cut]))
    assert before + "".join(streamed(BYTE_LEVEL, ids[cut:], ids[:cut])) == text


@pytest.mark.parametrize("tokenizer", [WITH_PREFIX, WITHOUT_PREFIX])
@given(ids=st.lists(ANY_ID, max_size=30), skip=st.booleans())
def test_sentencepiece_stream_equals_the_whole(tokenizer, ids, skip):
    joined = "".join(streamed(tokenizer, ids, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [WITH_PREFIX, WITHOUT_PREFIX])
@given(text=TEXT, tail=st.lists(st.integers(132, 195), max_size=3))
def test_sentencepiece_equals_the_library(tokenizer, text, tail):
    """`tail`: a run of continuation bytes, in which no character is valid."""
    ids = tokenizer.encode(text) + tokenizer.encode("a")[-1:] + tail
    library = tokenizer._backend.decode(ids, True)
    assert tokenizer.decode(ids) == library
    if "\u2581" not in text:
        assert library.startswith(text)


def test_valid_characters_in_a_broken_run_of_byte_tokens_are_kept():
    """The library replaces all five bytes; sentencepiece itself keeps the emoji."""
    ids = [4 + byte for byte in "🙂".encode() + b"\xff"]
    assert WITH_PREFIX.decode(ids) == "🙂\ufffd"
    assert "".join(streamed(WITH_PREFIX, ids)) == "🙂\ufffd"


def test_the_space_of_sentencepiece_is_dropped_only_at_the_start_of_a_text():
    the = WITH_PREFIX.encode("the", add_special_tokens=False)
    assert WITH_PREFIX.decode(the) == "the"
    assert "".join(streamed(WITH_PREFIX, the)) == "the"
    assert "".join(streamed(WITH_PREFIX, the, [WITH_PREFIX.bos_token_id])) == "the"
    assert "".join(streamed(WITH_PREFIX, the, [WITH_PREFIX.bos_token_id, *the])) == " the"
    assert WITH_PREFIX.token_text(the[-1]) == " the"


def test_special_tokens_can_be_shown():
    assert "".join(streamed(BYTE_LEVEL, [1], skip_special_tokens=False)) == "</s>"
    assert "".join(streamed(BYTE_LEVEL, [1])) == ""
    think = BYTE_LEVEL.encode("<think>")
    assert len(think) == 1
    assert "".join(streamed(BYTE_LEVEL, think)) == "<think>"


@pytest.mark.parametrize("token_id", [-1, 385, 10**6, 2**31, 2**40])
def test_ids_out_of_the_vocabulary_give_nothing(token_id):
    for tokenizer in (BYTE_LEVEL, WITH_PREFIX, word_tokenizer()):
        assert tokenizer.token_text(token_id) == ""
        assert tokenizer.decode([token_id]) == ""
        assert streamed(tokenizer, [token_id]) == ["", ""]


def word_tokenizer():
    """A decoder that is no join of bytes: words get spaces, continuations none."""
    words = ["[UNK]", "the", "cat", "##s", "sat", "."]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer_of(backend)


def metaspace_tokenizer():
    """Drops the space of the first token only, so what is first matters."""
    words = ["\u2581the", "\u2581cat", "s", "\u2581", "."]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=".")
    )
    backend.decoder = decoders.Metaspace()
    return tokenizer_of(backend)


@pytest.mark.parametrize("words", [word_tokenizer(), metaspace_tokenizer()])
@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, 7), max_size=12), cut=st.integers(0, 12))
def test_an_unknown_decoder_streams_by_windows(words, ids, cut):
    assert words.pieces is None
    assert "".join(streamed(words, ids)) == words.decode(ids)
    known = [i for i in ids if i < words.vocab_size]
    joined = "".join(streamed(words, known[cut:], known[:cut]))
    assert words.decode(known[:cut]) + joined == words.decode(known)


def test_windows_hold_back_half_a_character_and_give_it_at_the_end():
    """The same byte-level vocabulary, but through the window method."""
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = tokenizer_of(backend)
    assert tokenizer.pieces is None
    ids = tokenizer.encode("\U0001f680")
    assert len(ids) > 1
    assert streamed(tokenizer, ids) == [*[""] * (len(ids) - 1), "\U0001f680", ""]
    assert streamed(tokenizer, ids[:-1])[-1] == "\ufffd"
