"""Vocabularies and texts the tests of this room share."""

import functools
import random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.config.tokenizer_source import GgufVocabulary, TokenizerSource
from headrace.text.build import build_tokenizer
from headrace.text.fast_backend import FastBackend
from headrace.text.tokenizer import Tokenizer

SENTENCES = (
    "The capital of France is Paris. It's a city; don't we know?",
    "Café déjà vu, naïve cafe\u0301, Zu\u0308rich",
    "日本語のテキスト。中文、한국어 हिन्दी में العربية",
    "🙂👨‍👩‍👧‍👦🏳️‍🌈 emoji 🇫🇷 and \U0001d518\U0001d52b",
    "def f(x):\n    return x + 1  # add\n\n\tprint('a', \"b\")\r\n",
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """A trained byte-level BPE of 384 tokens, two of them special, one added and visible."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    return tokenizer_of(byte_level_backend())


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(
        FastBackend(backend), special_tokens={}, eos_token_ids=frozenset(), chat_template=None
    )


def pieces_vocabulary(**changes: object) -> GgufVocabulary:
    """A small sentencepiece vocabulary: control, bytes, a user-defined piece, scored pieces."""
    pieces = [
        "\u2581",
        "t",
        "h",
        "e",
        "a",
        "c",
        "\u2581t",
        "he",
        "\u2581the",
        "\u2581c",
        "at",
        "ca",
    ]
    control = ["<unk>", "<s>", "</s>", "<turn>"]
    by_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    user = ["[tool]", "  ", "   "]
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": tuple(control + by_byte + user + pieces),
        "merges": (),
        "scores": (0.0,) * 260 + (-1000.0,) * 3 + tuple(-float(i) for i in range(len(pieces))),
        "token_types": (2, 3, 3, 3) + (6,) * 256 + (4,) * 3 + (1,) * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": None,
        "add_bos_token": None,
        "add_eos_token": None,
        "add_space_prefix": None,
    }
    return GgufVocabulary(**{**fields, **changes})


def sentencepiece(**changes: object) -> Tokenizer:
    return build_tokenizer(TokenizerSource(gguf=pieces_vocabulary(**changes)))


def corpus() -> list[str]:
    """Texts that pull tokenizers apart: code, numbers, white space, scripts, special tokens."""
    texts = [
        *SENTENCES,
        "",
        " ",
        "   ",
        " a",
        "\n",
        "\r\n\r\n \n",
        "in 2024, 12345.678 and 3,14",
        "a1b2c3\n\n42",
        "½ ² ① ٣ Ⅷ",
        " " * 31 + "x",
        " " * 40 + "x",
        "\t\t\ttabs \t mixed",
        "\n" * 40,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "<bos>x<eos><unused5><start_of_turn>user\nhi<end_of_turn>\n",
        "<s>[INST] hi [/INST]</s>",
        "<table><tr><td>1</td></tr></table>",
        "<0x41> <0xE2><0x96>",
        "\u2581\u2581lower\u2581x",
        "\x00\x01\x7f\u200b\ufeff\ufffd",
        "I'LL we'Ve it's 'tis",
        "x" * 100,
        "foo\u00a0bar\u3000baz\u2028end",
        "https://example.com/a?b=1&c=%20#d",
        "if(a<=b&&c!=d){e+=1;}// x ≠ y",
        "SELECT * FROM t WHERE a='b' -- c",
    ]
    chosen = random.Random(7)
    alphabets = ("abc XYZ 0189 \n\t.,'-_", "éüß日本🙂\u0301\u2581 ", "<|>im_startend0xAF\n ")
    for _ in range(90):
        alphabet = chosen.choice(alphabets)
        texts.append("".join(chosen.choices(alphabet, k=chosen.randint(1, 30))))
    return texts
