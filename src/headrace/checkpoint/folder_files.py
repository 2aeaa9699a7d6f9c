"""The small files of a checkpoint folder: configuration, generation defaults, tokenizer."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint.json_shapes import TokenizerConfig
from headrace.checkpoint.lfs_pointer import refuse_pointer
from headrace.config.tokenizer_source import TokenizerSource

SUPPORTED_FORMATS = "Supported: .safetensors in float32, bfloat16 or float16, and .gguf files"

# Vocabularies without a tokenizer.json; only transformers knows how to convert them.
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_NAMED_TEMPLATES = "additional_chat_templates"
_SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
    "additional_special_tokens",
)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The one part of a tokenizer.json needed here; the rest is skipped without building it."""

    added_tokens: list[_AddedToken] = []


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary


def read_json(path: Path, shape: type[msgspec.Struct]) -> dict[str, Any]:
    """A JSON object whose values have the types that `shape` states.

    Raises:
        CheckpointError: it cannot be read or is something else; names file and key.
    """
    with _told(path):
        # Not msgspec's reader: Python wrote these files, with NaN and Infinity for numbers.
        content: dict[str, Any] = json.loads(_read(path))
        msgspec.convert(content, shape, str_keys=True)
    return content


def optional_json(path: Path, shape: type[msgspec.Struct]) -> dict[str, Any]:
    """Like `read_json`; empty when nothing has that name, be it a folder or a broken link."""
    return read_json(path, shape) if os.path.lexists(path) else {}


def named_like(folder: Path, pattern: str) -> list[Path]:
    """Files of the folder in order, without those that macOS puts beside them (`._model.gguf`)."""
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    """UnsupportedError for AWQ, GPTQ, fp8 and whatever else names itself in config.json."""
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if not settings:
                continue
            method = settings.get("quant_method") or settings.get("quantization") or "unnamed"
            raise UnsupportedError(
                f"{path} is quantized with {method}",
                why=f"config.json holds a {key}",
                remedy=SUPPORTED_FORMATS,
            )


def folder_tokenizer_source(
    folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> TokenizerSource | None:
    """The folder's tokenizer with all end tokens that any of its files names."""
    tokenizer_json = folder / "tokenizer.json"
    has_json = os.path.lexists(tokenizer_json)
    if not has_json and not any((folder / name).is_file() for name in _OTHER_TOKENIZERS):
        return None
    settings = _settings(folder)
    ids = {
        *_token_ids(config.get("eos_token_id")),
        *_token_ids((config.get("text_config") or {}).get("eos_token_id")),
        *_token_ids(generation_config.get("eos_token_id")),
        *_token_ids(_tokenizer_eos_id(tokenizer_json if has_json else None, settings)),
    }
    return TokenizerSource(
        tokenizer_json=tokenizer_json if has_json else None,
        folder=None if has_json else folder,
        settings=settings,
        chat_template=_chat_template(folder, settings),
        eos_token_ids=tuple(sorted(ids)),
    )


def _settings(folder: Path) -> dict[str, Any]:
    """In folders saved before tokenizer_config.json held the added tokens (transformers 4.34) what
    special_tokens_map.json says goes before it, as in transformers; later ones say it in both."""
    settings = optional_json(folder / "tokenizer_config.json", TokenizerConfig)
    special = optional_json(folder / "special_tokens_map.json", TokenizerConfig)
    is_old = "added_tokens_decoder" not in settings
    for name in _SPECIAL_TOKENS:
        if special.get(name) is not None and (is_old or settings.get(name) is None):
            settings[name] = special[name]
    return settings


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Files of templates go before what tokenizer_config.json holds, as in transformers, which
    saves those with a name of their own in a folder of theirs."""
    named = {file.stem: text_of(file) for file in named_like(folder / _NAMED_TEMPLATES, "*.jinja")}
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        default = text_of(file)
        return {"default": default, **named} if named else default
    if named:
        return named
    template = (
        optional_json(folder / "chat_template.json", TokenizerConfig).get("chat_template")
        or settings.get("chat_template")
        or None
    )
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}
    return template


def _token_ids(value: Any) -> Iterator[int]:
    """An id, a list of them, or nothing."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list):
        yield from value


def _tokenizer_eos_id(tokenizer_json: Path | None, settings: Mapping[str, Any]) -> int | None:
    """The id of tokenizer_config.json's eos_token."""
    token = settings.get("eos_token")
    if isinstance(token, Mapping):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    for index, entry in (settings.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == token:
            return int(index)
    if tokenizer_json is None:
        return None
    added: _AddedTokens = decoded_json(tokenizer_json, _AddedTokens)
    for entry in added.added_tokens:
        if entry.content == token:
            return entry.id
    file: _TokenizerFile = decoded_json(tokenizer_json, _TokenizerFile)
    vocabulary = file.model.vocab
    if isinstance(vocabulary, list):  # unigram: pieces with scores, the place is the id
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    return vocabulary.get(token)


def decoded_json(path: Path, kind: Any) -> Any:
    """What a JSON file holds, as a type of msgspec.

    Raises:
        CheckpointError: it cannot be read or is something else.
    """
    with _told(path):
        return msgspec.json.decode(_read(path), type=kind)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """CheckpointError for JSON that is broken, nested too deep, or of other types."""
    try:
        yield
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        refuse_pointer(path)
        raise CheckpointError(
            f"{path} is not the JSON it should be",
            why=str(error),
            remedy="Download or copy the file again",
        ) from error


def text_of(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8", why=str(error), remedy="Download or copy the file again"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)) from error
