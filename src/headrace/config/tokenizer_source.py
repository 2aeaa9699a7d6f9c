"""Where a tokenizer comes from, as plain data: read by `checkpoint`, built by `text`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokenizer keys of a GGUF file, as they stand there.

    `model` is `tokenizer.ggml.model` ("gpt2": byte-level BPE with merges; "llama": sentencepiece
    pieces with scores). `token_types` follow GGUF: 1 normal, 2 unknown, 3 control, 4 user defined,
    5 unused, 6 byte.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    token_types: tuple[int, ...]
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_space_prefix: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """One of: a `tokenizer.json` file, a folder only transformers can read, or a GGUF vocabulary.

    `settings` is a folder's tokenizer_config.json (special tokens, chat template, ...).
    `chat_template` is Jinja text, or several by name (default, tool_use).
    `chat_template_file` is the file it is from where that was asked for by name.
    `eos_token_ids` is the union of what config, generation_config and tokenizer name.
    """

    tokenizer_json: Path | None = None
    folder: Path | None = None
    gguf: GgufVocabulary | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | Mapping[str, str] | None = None
    chat_template_file: Path | None = None
    eos_token_ids: tuple[int, ...] = ()
    cache_key: str = ""
