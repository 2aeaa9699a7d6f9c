"""A `tokenizers.Tokenizer` from the vocabulary of a GGUF file.

Two kinds of vocabulary are read. "gpt2" is byte-level BPE with its merges in the file. "llama" is
sentencepiece BPE: pieces with scores, whose merges are derived here. Facts come from llama.cpp
(`llama-vocab.cpp`), from its converter, and from how transformers reads the same files.
"""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.base.log import get_logger
from headrace.config.tokenizer_source import GgufVocabulary
from headrace.text.fast_backend import surround
from headrace.text.merges import merges_from_scores
from headrace.text.pieces import METASPACE
from headrace.text.pre_tokenizers import pre_tokenizer

log = get_logger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type


def gguf_tokenizer(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """Build it.

    Raises:
        UnsupportedError: another kind of vocabulary, or an unknown pre-tokenizer.
        CheckpointError: keys that do not fit each other.
    """
    _check(vocabulary)
    if vocabulary.model == "gpt2":
        tokenizer, adds_bos = _byte_level(vocabulary), pre_tokenizer(vocabulary.pre).adds_bos
    else:
        tokenizer, adds_bos = _sentencepiece(vocabulary), True
    _add_tokens(tokenizer, vocabulary)
    surround(
        tokenizer,
        before=_around(vocabulary, "bos", vocabulary.add_bos_token, adds_bos),
        after=_around(vocabulary, "eos", vocabulary.add_eos_token, False),
    )
    return tokenizer


def special_tokens_of(vocabulary: GgufVocabulary) -> dict[str, str]:
    """Name -> text, named as tokenizer_config.json does."""
    ids = {
        "bos_token": vocabulary.bos_token_id,
        "eos_token": vocabulary.eos_token_id,
        "unk_token": vocabulary.unknown_token_id,
        "pad_token": vocabulary.padding_token_id,
    }
    return {
        name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None
    }


def _check(vocabulary: GgufVocabulary) -> None:
    if vocabulary.model not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"the GGUF vocabulary of kind {vocabulary.model!r} is not supported",
            why='Supported are "gpt2" (byte-level BPE) and "llama" (sentencepiece BPE)',
            remedy="Name a folder with a tokenizer.json as the tokenizer",
        )
    size = len(vocabulary.tokens)
    lists: dict[str, Sequence[float]] = {"token_type": vocabulary.token_types}
    if vocabulary.model == "llama":
        lists["scores"] = vocabulary.scores
    for key, values in lists.items():
        if len(values) != size:
            raise CheckpointError(
                f"tokenizer.ggml.{key} has {len(values)} entries for {size} tokens",
                remedy="Convert or download the GGUF file again",
            )
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = getattr(vocabulary, f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < size:
            raise CheckpointError(
                f"tokenizer.ggml.{name}_token_id is {token_id}, but there are {size} tokens",
                remedy="Convert or download the GGUF file again",
            )


def _ids(tokens: list[str]) -> dict[str, int]:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        token_id = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise CheckpointError(
            f"tokens {token_id} and {ids[tokens[token_id]]} of the GGUF file are both "
            f"{tokens[token_id]!r}",
            why="Two ids for one text cannot be told apart",
            remedy="Convert or download the GGUF file again",
        )
    return ids


def _byte_level(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    if not vocabulary.pre:
        log.warning(
            "The GGUF file does not say how its text is cut (tokenizer.ggml.pre), as those made "
            "before May 2024: most models then answer worse. Take a newer file, or name a folder "
            "with the model's tokenizer.json as the tokenizer"
        )
    rule = pre_tokenizer(vocabulary.pre)
    ids = _ids(list(vocabulary.tokens))
    merges = [_merge(line, ids) for line in vocabulary.merges]
    tokenizer = tokenizers.Tokenizer(
        BPE(vocab=ids, merges=merges, ignore_merges=rule.whole_words_first)
    )
    if rule.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(line: str, ids: dict[str, int]) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not separator or left not in ids or right not in ids or left + right not in ids:
        raise CheckpointError(
            f"the merge {line[:80]!r} of the GGUF file is not two tokens that make a third",
            remedy="Convert or download the GGUF file again",
        )
    return left, right


def _sentencepiece(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """No pre-tokenizer: sentencepiece merges over the whole text, spaces written as U+2581.

    A prefix space is put before the text and after every special token, as llama.cpp does.
    """
    tokens = [
        METASPACE * len(token) if len(token) > 1 and not token.strip(" ") else token
        for token in vocabulary.tokens
    ]
    ids = _ids(tokens)
    has_bytes = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    unknown = vocabulary.unknown_token_id
    tokenizer = tokenizers.Tokenizer(
        BPE(
            vocab=ids,
            merges=merges_from_scores(tokens, _best_first(vocabulary)),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    spaces: Any = normalizers.Replace(" ", METASPACE)
    decoding = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix is not False:
        spaces = normalizers.Sequence([normalizers.Prepend(METASPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _best_first(vocabulary: GgufVocabulary) -> list[int]:
    """Ids of the pieces that text can become, by score.

    User-defined pieces are cut out of the text before anything is merged, hence rank before all
    others, in order of id. Control, unknown and byte tokens are never made from text.
    """
    scores, kinds = vocabulary.scores, vocabulary.token_types
    user_defined = [i for i, kind in enumerate(kinds) if kind == _USER_DEFINED]
    reserved = (_CONTROL, _UNKNOWN, _USER_DEFINED, _BYTE)
    scored = [i for i, kind in enumerate(kinds) if kind not in reserved]
    return user_defined + sorted(scored, key=scores.__getitem__, reverse=True)


def _add_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Control tokens are special; user-defined ones are found whole in a text but stay visible.

    Runs of spaces that `_sentencepiece` respelled are reached by merges instead.
    """
    known: dict[int, list[AddedToken]] = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind in known and tokenizer.token_to_id(token) is not None:
            known[kind].append(AddedToken(token, normalized=False, special=kind == _CONTROL))
    tokenizer.add_special_tokens(known[_CONTROL])
    tokenizer.add_tokens(known[_USER_DEFINED])


def _around(
    vocabulary: GgufVocabulary, which: str, asked: bool | None, default: bool
) -> str | None:
    token_id: int | None = getattr(vocabulary, f"{which}_token_id")
    if not (default if asked is None else asked):
        return None
    if token_id is not None:
        return vocabulary.tokens[token_id]
    if asked:
        raise CheckpointError(
            f"tokenizer.ggml.add_{which}_token is set but there is no tokenizer.ggml."
            f"{which}_token_id",
            remedy="Convert or download the GGUF file again",
        )
    return None
