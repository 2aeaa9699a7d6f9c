"""Tokenizers from tokenizer.json and from folders for transformers; what surrounds them."""

import json
import sys
import threading
import time

import pytest
from text_samples import SENTENCES, byte_level, byte_level_backend
from tokenizers import processors

from headrace.base.errors import CheckpointError, RequestError, UnsupportedError
from headrace.config.tokenizer_source import TokenizerSource
from headrace.text.build import build_tokenizer


def from_json(folder, settings=None, *, change=None, **source):
    backend = byte_level_backend()
    if change is not None:
        change(backend)
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return build_tokenizer(TokenizerSource(tokenizer_json=path, settings=settings or {}, **source))


@pytest.mark.parametrize("text", SENTENCES)
def test_round_trip(tmp_path, text):
    tokenizer = from_json(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_facts_of_a_vocabulary(tmp_path):
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    tokenizer = from_json(tmp_path, settings, eos_token_ids=(7,))
    assert tokenizer.vocab_size == 385
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == {1, 7}
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.token_text(tokenizer.encode("The capital")[-1]).endswith("l")
    assert not tokenizer.has_chat_template


def surrounded(single):
    """Puts special tokens around texts: `change` of `from_json`."""

    def change(backend):
        tokens = [(token, id) for id, token in enumerate(("<s>", "</s>")) if token in single]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)

    return change


@pytest.mark.parametrize("single", ["$A </s>", "<s> $A", "$A"])
@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizerFast", None])
@pytest.mark.parametrize(
    "said", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_what_surrounds_a_text_is_the_files_own_as_in_transformers(tmp_path, single, kind, said):
    """Qwen3-Embedding's file puts an end behind each text, beside `"add_bos_token": false`; without
    it the vectors are those of another token."""
    from transformers import PreTrainedTokenizerFast

    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": kind, **said}
    tokenizer = from_json(tmp_path, settings, change=surrounded(single))
    ids = tokenizer.encode("a")
    assert tokenizer.decode(ids, skip_special_tokens=False) == single.replace("$A", "a").replace(
        " ", ""
    )
    assert tokenizer.encode("a", add_special_tokens=False) == [
        token_id for token_id in ids if token_id > 1
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("a") == ids


def test_a_second_bos_is_told_once(tmp_path, caplog):
    """vllm#27486: the text of a chat template, given to generate."""
    tokenizer = from_json(tmp_path, {"bos_token": "<s>"}, change=surrounded("<s> $A"))
    assert tokenizer.encode("<s>a", add_special_tokens=False)[0] == tokenizer.encode("a")[0] == 0
    assert not caplog.messages
    assert [tokenizer.encode("<s>a")[:2] for _ in range(2)] == [[0, 0]] * 2
    (message,) = caplog.messages
    assert "begins with <s> and got another" in message


def test_tokens_only_the_settings_name_are_added(tmp_path):
    settings = {
        "added_tokens_decoder": {
            "386": {"content": "<call>", "special": False, "normalized": False},
            "385": {"content": "<|end|>", "special": True, "normalized": False, "lstrip": True},
            "0": {"content": "<s>", "special": True},
        },
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<more>"],
    }
    tokenizer = from_json(tmp_path, settings)
    assert tokenizer.encode("<|end|><call><more>") == [385, 386, 387]
    assert tokenizer.encode("  <|end|>") == [385]  # lstrip, as declared
    assert tokenizer.special_ids == {0, 1, 385, 387}
    assert tokenizer.eos_token_ids == {385}
    assert tokenizer.vocab_size == 388


def test_a_visible_token_that_the_settings_name_becomes_special(tmp_path):
    assert from_json(tmp_path).decode([384]) == "<think>"
    tokenizer = from_json(tmp_path, {"extra_special_tokens": {"think_token": "<think>"}})
    assert tokenizer.encode("<think>") == [384]
    assert tokenizer.decode([384]) == ""


def test_truncation_and_padding_of_a_file_are_switched_off(tmp_path):
    def cut(backend):
        backend.enable_truncation(max_length=3)
        backend.enable_padding(length=8)

    tokenizer = from_json(tmp_path, change=cut)
    text = "the words of a long sentence"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"chat_template": "A"}, "A"),
        ({"chat_template": {"tool_use": "B", "default": "C"}}, "C"),
    ],
)
def test_where_a_chat_template_comes_from(tmp_path, source, expected):
    tokenizer = from_json(tmp_path, **source)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == expected


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        byte_level().encode("ab\ud83d")


def test_the_empty_text_has_no_ids():
    assert byte_level().encode("") == []
    assert byte_level().decode([]) == ""


@pytest.mark.parametrize("content", ["", "{", '{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        build_tokenizer(TokenizerSource(tokenizer_json=path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.json cannot be read"):
        build_tokenizer(TokenizerSource(tokenizer_json=tmp_path / "gone.json"))


def test_no_source_is_refused():
    with pytest.raises(CheckpointError, match=r"no tokenizer.*token ids"):
        build_tokenizer(TokenizerSource())


def test_remote_code_is_refused_before_anything_is_loaded(tmp_path):
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('this must not run')")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=r"Remote code is never run.*tokenizer\.json"):
        build_tokenizer(TokenizerSource(folder=tmp_path, settings=settings))


def test_a_folder_transformers_cannot_read(tmp_path):
    with pytest.raises(CheckpointError, match="transformers cannot read"):
        build_tokenizer(TokenizerSource(folder=tmp_path))


def test_a_folder_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match="pip install transformers"):
        build_tokenizer(TokenizerSource(folder=tmp_path))


def byt5_folder(folder):
    """ByT5 has no vocabulary file and no fast twin: its ids are bytes + 3."""
    settings = {"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    return TokenizerSource(folder=folder, settings=settings)


def test_a_tokenizer_only_transformers_can_read(tmp_path):
    tokenizer = build_tokenizer(byt5_folder(tmp_path))
    assert tokenizer.pieces is None
    assert tokenizer.encode("aé") == [*(byte + 3 for byte in "aé".encode()), 1]
    assert tokenizer.decode([100, 1, 101]) == "ab"
    assert tokenizer.decode([100, 1, 101], skip_special_tokens=False) == "a</s>b"
    assert tokenizer.eos_token_ids == {1}


def test_a_folder_that_transformers_turns_into_a_fast_tokenizer(tmp_path):
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    settings = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = build_tokenizer(TokenizerSource(folder=tmp_path, settings=settings))
    assert tokenizer.pieces is not None
    assert tokenizer.encode(SENTENCES[0]) == byte_level().encode(SENTENCES[0])


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path):
    """The event loop of a server is one of them."""
    tokenizer = from_json(tmp_path)
    encoding = threading.Thread(target=tokenizer.encode, args=("The capital of " * 60_000,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5  # hundreds; one or two where others have to wait
