"""The `tokenizers` library as a backend, with the settings a checkpoint puts beside it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import processors

from headrace.text.pieces import Pieces, rules_of

# As tokenizer_config.json and chat templates name them.
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class FastBackend:
    """One `tokenizers.Tokenizer`. Truncation and padding a file may carry are switched off:
    a prompt is never cut in silence."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = max([tokenizer.get_vocab_size() - 1, *added]) + 1
        decoder = tokenizer.decoder
        rules = None if decoder is None else rules_of(json.loads(decoder.__getstate__()))
        self.pieces: Pieces | None = None
        if rules is not None:
            self.pieces = Pieces(rules, tokenizer.id_to_token, self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: only for batches does the library let other threads of Python run, and
        # the fast form leaves out places in the text, which takes half of the time.
        (encoded,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


def apply_settings(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Do to a tokenizer.json what transformers does with its tokenizer_config.json.

    Tokens named there and unknown to the tokenizer are added. What surrounds a text is the file's
    own business: `add_bos_token` and `add_eos_token` are stale where they say something else.
    """
    added = _added(tokenizer)
    declared = settings.get("added_tokens_decoder") or {}
    ordered = [token for _, token in sorted(declared.items(), key=lambda item: int(item[0]))]
    tokenizer.add_tokens(
        [_added_token(token) for token in ordered if token["content"] not in added]
    )
    added = _added(tokenizer)
    named = [*special_tokens(settings).values(), *_extra_special_tokens(settings)]
    tokenizer.add_special_tokens([token for token in named if not added.get(token, False)])


def surround(tokenizer: tokenizers.Tokenizer, *, before: str | None, after: str | None) -> None:
    """Put these special tokens around every text that is encoded with special tokens."""
    tokens = [token for token in (before, after) if token is not None]
    parts = [before, "$A", after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[part for part in parts if part is not None],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(tokens)],
    )


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens that tokenizer_config.json sets."""
    return {
        name: _content(settings[name]) for name in SPECIAL_NAMES if settings.get(name) is not None
    }


def _added(tokenizer: tokenizers.Tokenizer) -> dict[str, bool]:
    """Text of each added token -> whether it is special."""
    tokens = tokenizer.get_added_tokens_decoder().values()
    return {token.content: token.special for token in tokens}


def _extra_special_tokens(settings: Mapping[str, Any]) -> list[str]:
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(key) or []
        extra.extend(map(_content, value.values() if isinstance(value, Mapping) else value))
    return extra


def _content(token: Any) -> str:
    """A special token stands in the file as a string or as an object."""
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _added_token(token: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(
        token["content"], **{flag: bool(token[flag]) for flag in flags if flag in token}
    )
