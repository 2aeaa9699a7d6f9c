"""Tokenizers from GGUF vocabularies: the demo models' ids, both kinds, the cache, refusals."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest
from text_samples import corpus, pieces_vocabulary, sentencepiece
from tokenizers import pre_tokenizers

from headrace.base.errors import CheckpointError, NotFoundError, UnsupportedError
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.opening import open_checkpoint
from headrace.config.tokenizer_source import GgufVocabulary, TokenizerSource
from headrace.text import build
from headrace.text.build import build_tokenizer
from headrace.text.detokenizer import Detokenizer
from headrace.text.pieces import byte_alphabet
from headrace.text.pre_tokenizers import PRE_TOKENIZERS

EXPECTED = Path(__file__).with_name("expected_ids.json")


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def demo(request):
    try:
        path = resolve_model(request.param)
    except NotFoundError as error:
        pytest.skip(str(error))
    source = open_checkpoint(path, weights=False).tokenizer_source
    return request.param, build_tokenizer(source)


@pytest.mark.real
def test_ids_are_those_of_transformers(demo):
    """See make_expected_ids.py for the one rule in which transformers is corrected."""
    name, tokenizer = demo
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))[name]
    assert [text for text, _ in expected] == corpus(), "run tests/text/make_expected_ids.py"
    wrong = [text for text, ids in expected if tokenizer.encode(text) != ids]
    assert wrong == []


@pytest.mark.real
def test_demo_texts_come_back_streamed(demo):
    _, tokenizer = demo
    for text in corpus():
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert streamed == tokenizer.decode(ids) == tokenizer._backend.decode(ids, True)


@pytest.mark.real
def test_facts_of_the_demo_models(demo):
    name, tokenizer = demo
    hello = tokenizer.encode("Hello world! 123")
    if name == "smollm2":
        # As llama.cpp gives them: digits alone, the space before them too.
        assert hello == [19556, 905, 17, 216, 33, 34, 35]
        assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (49152, 1)
        assert 2 in tokenizer.eos_token_ids
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.encode(prompt).count(1) == 3
    else:
        assert hello[0] == tokenizer.bos_token_id == 2
        assert (tokenizer.vocab_size, tokenizer.has_chat_template) == (262144, False)
        assert tokenizer.eos_token_ids == {1, 106}


def byte_level_vocabulary(**changes):
    alphabet = list(byte_alphabet().values())
    words = ["he", "hel", "11", "12", "Ġh", "hello"]
    tokens = ("<|end|>", *alphabet, *words, "<think>", "a b")
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": ("h e", "he l", "1 1", "1 2", "Ġ h"),
        "scores": (),
        "token_types": (3,) + (1,) * (len(tokens) - 3) + (4, 4),
        "bos_token_id": None,
        "eos_token_id": 0,
        "unknown_token_id": None,
        "padding_token_id": None,
        "add_bos_token": None,
        "add_eos_token": None,
        "add_space_prefix": None,
    }
    return GgufVocabulary(**{**fields, **changes})


def tokens_of(vocabulary, text):
    tokenizer = build_tokenizer(TokenizerSource(gguf=vocabulary))
    return [vocabulary.tokens[token_id] for token_id in tokenizer.encode(text)]


def test_the_pre_tokenizer_decides(caplog):
    assert tokens_of(byte_level_vocabulary(), "112 hel") == ["11", "2", "Ġ", "hel"]
    assert tokens_of(byte_level_vocabulary(pre="smollm"), "112") == ["1", "1", "2"]
    assert tokens_of(byte_level_vocabulary(pre="qwen2"), "112") == ["1", "1", "2"]
    assert not caplog.messages
    assert tokens_of(byte_level_vocabulary(pre=""), "112") == ["11", "2"]
    (message,) = caplog.messages  # llama.cpp#7476: nobody was told
    assert "does not say how its text is cut" in message


def test_whole_words_first_where_the_model_wants_it():
    """No merge makes "hello"; Llama 3 takes it whole all the same."""
    assert tokens_of(byte_level_vocabulary(), "hello") == ["hel", "l", "o"]
    llama3 = byte_level_vocabulary(pre="llama-bpe", add_bos_token=False)
    assert tokens_of(llama3, "hello") == ["hello"]


def test_added_tokens_are_found_whole_and_only_control_tokens_are_hidden():
    vocabulary = byte_level_vocabulary()
    assert tokens_of(vocabulary, "<think>a b<|end|>") == ["<think>", "a b", "<|end|>"]
    tokenizer = build_tokenizer(TokenizerSource(gguf=vocabulary))
    assert tokenizer.decode(tokenizer.encode("<think>a b<|end|>")) == "<think>a b"
    assert tokenizer.eos_token_ids == {0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bos_token_id": 0}, ["h"]),
        ({"bos_token_id": 0, "pre": "llama-bpe"}, ["<|end|>", "h"]),
        ({"bos_token_id": 0, "pre": "llama-bpe", "add_bos_token": False}, ["h"]),
        ({"pre": "llama-bpe"}, ["h"]),
        ({"bos_token_id": 0, "add_bos_token": True}, ["<|end|>", "h"]),
        ({"bos_token_id": 0, "add_bos_token": True, "add_eos_token": True},
         ["<|end|>", "h", "<|end|>"]),
    ],
)  # fmt: skip
def test_what_surrounds_a_text(changes, expected):
    assert tokens_of(byte_level_vocabulary(**changes), "h") == expected


def test_smollm_cuts_as_its_own_tokenizer_json_does():
    tokenizer = build_tokenizer(TokenizerSource(gguf=byte_level_vocabulary(pre="smollm")))
    ours = tokenizer._backend._tokenizer.pre_tokenizer
    original = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in corpus():
        assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_all_text(pre):
    vocabulary = byte_level_vocabulary(pre=pre, merges=(), add_bos_token=False)
    tokenizer = build_tokenizer(TokenizerSource(gguf=vocabulary))
    for text in corpus():
        if pre not in ("qwen2", "qwen35"):  # these compose characters first
            assert tokenizer.decode(tokenizer.encode(text), False) == text


def test_qwen_composes_characters():
    vocabulary = byte_level_vocabulary(pre="qwen2", merges=())
    tokenizer = build_tokenizer(TokenizerSource(gguf=vocabulary))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_merges_follow_scores():
    vocabulary = pieces_vocabulary()
    assert tokens_of(vocabulary, "the cat") == ["<s>", "\u2581the", "\u2581c", "at"]
    better = list(vocabulary.scores)
    better[vocabulary.tokens.index("ca")] = 5.0
    assert tokens_of(pieces_vocabulary(scores=tuple(better)), "cat") == [
        "<s>", "\u2581", "ca", "t",
    ]  # fmt: skip


def test_what_is_no_piece_becomes_bytes():
    assert tokens_of(pieces_vocabulary(), "aé") == ["<s>", "\u2581", "a", "<0xC3>", "<0xA9>"]


def test_text_that_looks_like_a_byte_token_stays_text():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("<0x41>")
    assert pieces_vocabulary().tokens.index("<0x41>") not in ids
    assert tokenizer.decode(ids) == "<0x41>"


def test_without_byte_tokens_what_is_no_piece_is_unknown():
    whole = pieces_vocabulary()
    keep = [i for i, kind in enumerate(whole.token_types) if kind != 6]
    vocabulary = pieces_vocabulary(
        tokens=tuple(whole.tokens[i] for i in keep),
        scores=tuple(whole.scores[i] for i in keep),
        token_types=tuple(whole.token_types[i] for i in keep),
    )
    assert tokens_of(vocabulary, "aéé") == ["<s>", "\u2581", "a", "<unk>"]


def test_the_space_prefix():
    """Before the text and after special tokens, one more than the text has (as llama.cpp)."""
    assert tokens_of(pieces_vocabulary(), "<turn>a") == ["<s>", "<turn>", "\u2581", "a"]
    assert tokens_of(pieces_vocabulary(), " the")[1:] == ["  ", "t", "he"]
    without = pieces_vocabulary(add_space_prefix=False)
    assert tokens_of(without, "a<turn>a") == ["<s>", "a", "<turn>", "a"]
    assert tokens_of(without, " the") == ["<s>", "\u2581the"]


def test_runs_of_spaces_are_tokens_of_their_own():
    without = pieces_vocabulary(add_space_prefix=False)
    assert tokens_of(without, "a  a   the") == ["<s>", "a", "  ", "a", "   ", "t", "he"]
    tokenizer = build_tokenizer(TokenizerSource(gguf=without))
    assert tokenizer.decode(tokenizer.encode("a  a   the")) == "a  a   the"
    assert tokens_of(without, "[tool]a") == ["<s>", "[tool]", "a"]


def test_the_built_tokenizer_is_kept_and_a_broken_copy_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    source = TokenizerSource(gguf=pieces_vocabulary(), cache_key="some/key of any kind")
    first = build_tokenizer(source).encode("the cat")
    (kept,) = (tmp_path / "tokenizers").iterdir()

    monkeypatch.setattr(build, "gguf_tokenizer", lambda vocabulary: pytest.fail("was built again"))
    assert build_tokenizer(source).encode("the cat") == first
    monkeypatch.undo()

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    content = kept.read_text(encoding="utf-8")
    kept.write_text(content[: len(content) // 2], encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert build_tokenizer(source).encode("the cat") == first
    assert "is broken and made anew" in caplog.text
    assert kept.read_text(encoding="utf-8") == content
    assert list((tmp_path / "tokenizers").iterdir()) == [kept]

    other = TokenizerSource(gguf=pieces_vocabulary(), cache_key="another")
    build_tokenizer(other)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2


def test_others_may_read_the_kept_tokenizer_and_a_failed_write_leaves_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    mask = os.umask(0o022)
    try:
        build_tokenizer(TokenizerSource(gguf=pieces_vocabulary(), cache_key="key"))
    finally:
        os.umask(mask)
    (kept,) = (tmp_path / "tokenizers").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o644

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    build_tokenizer(TokenizerSource(gguf=pieces_vocabulary(), cache_key="other"))
    assert list((tmp_path / "tokenizers").iterdir()) == [kept]


@pytest.mark.parametrize("cache", [".", "tokenizers/below"])
def test_without_a_cache_the_tokenizer_is_built_all_the_same(tmp_path, monkeypatch, caplog, cache):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / cache))
    (tmp_path / "tokenizers").write_text("a file where the folder should be")
    source = TokenizerSource(gguf=pieces_vocabulary(), cache_key="key")
    assert build_tokenizer(source).encode("the")
    assert "cannot be cached" in caplog.text


@pytest.mark.parametrize(
    ("vocabulary", "error", "words"),
    [
        (pieces_vocabulary(model="rwkv"), UnsupportedError, "'rwkv' is not supported"),
        (byte_level_vocabulary(pre="mystery"), UnsupportedError, "'mystery'.*llama-bpe.*smollm"),
        (pieces_vocabulary(scores=(0.0,)), CheckpointError, "scores has 1 entries for 275"),
        (pieces_vocabulary(token_types=(1,)), CheckpointError, "token_type has 1 entries"),
        (pieces_vocabulary(bos_token_id=275), CheckpointError, "bos_token_id is 275"),
        (pieces_vocabulary(add_eos_token=True, eos_token_id=None), CheckpointError,
         "add_eos_token is set"),
        (byte_level_vocabulary(merges=("h z",)), CheckpointError, "merge 'h z'"),
        (byte_level_vocabulary(merges=("hel",)), CheckpointError, "merge 'hel'"),
        (pieces_vocabulary(tokens=("t", *pieces_vocabulary().tokens[1:])), CheckpointError,
         "tokens 0 and 264"),
    ],
)  # fmt: skip
def test_refusals(vocabulary, error, words):
    with pytest.raises(error, match=words):
        build_tokenizer(TokenizerSource(gguf=vocabulary))
