"""`build_tokenizer`: from a source, plain data, to a `Tokenizer`."""

import hashlib
from pathlib import Path
from typing import Any

import tokenizers

from headrace.base import env
from headrace.base.errors import CheckpointError, ConfigError, RequestError
from headrace.base.log import get_logger
from headrace.base.whole_file import whole_file
from headrace.config.tokenizer_source import GgufVocabulary, TokenizerSource
from headrace.text.chat_template import ChatTemplate
from headrace.text.fast_backend import FastBackend, apply_settings, special_tokens
from headrace.text.gguf_tokenizer import gguf_tokenizer, special_tokens_of
from headrace.text.tokenizer import Backend, Tokenizer
from headrace.text.transformers_backend import load_with_transformers

log = get_logger(__name__)

_CACHE_FORMAT = 1  # raise it when a change in this room gives other tokenizers


def build_tokenizer(source: TokenizerSource) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: the files are missing, broken, or contradict each other.
        UnsupportedError: a kind of tokenizer that is not read here, or one that needs remote code.
        ConfigError: the chat template that was asked for is no Jinja.
    """
    names = special_tokens(source.settings)
    ends = set(source.eos_token_ids)
    backend: Backend
    if source.tokenizer_json is not None:
        backend = FastBackend(_from_json(source.tokenizer_json, source.settings))
    elif source.gguf is not None:
        backend = FastBackend(_from_gguf(source.gguf, source.cache_key))
        names = special_tokens_of(source.gguf)
    elif source.folder is not None:
        backend, own_names = load_with_transformers(source.folder, source.settings)
        names = {**own_names, **names}
    else:
        raise CheckpointError(
            "this checkpoint has no tokenizer",
            why="There is no tokenizer.json, no sentencepiece model and no GGUF vocabulary",
            remedy="Name one (tokenizer), or send token ids instead of text",
        )
    end = names.get("eos_token")
    end_id = None if end is None else backend.token_id(end)
    return Tokenizer(
        backend,
        special_tokens=names,
        eos_token_ids=frozenset(ends if end_id is None else {*ends, end_id}),
        chat_template=_chat_template(source),
    )


def _chat_template(source: TokenizerSource) -> ChatTemplate | None:
    template = source.chat_template
    if not template:
        return None
    made = ChatTemplate({"default": template} if isinstance(template, str) else template)
    if source.chat_template_file is not None:
        try:
            made.compile()
        except RequestError as error:
            raise ConfigError(
                f"{source.chat_template_file} is no chat template", why=error.why
            ) from error
    return made


def _from_json(path: Path, settings: Any) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer",
            why=str(error)[:300],
            remedy="Download or save the checkpoint again",
        ) from error
    apply_settings(tokenizer, settings)
    return tokenizer


def _from_gguf(vocabulary: GgufVocabulary, cache_key: str) -> tokenizers.Tokenizer:
    """Deriving merges takes seconds for a large vocabulary, so that result is kept on disk."""
    if vocabulary.model != "llama" or not cache_key:
        return gguf_tokenizer(vocabulary)
    try:
        path = _cache_path(cache_key)
    except ConfigError as error:
        log.warning("the tokenizer cannot be cached: %s", error)
        return gguf_tokenizer(vocabulary)
    if path.exists():
        try:
            cached = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            log.warning("the cached tokenizer %s is broken and made anew: %s", path, error)
        else:
            return cached
    tokenizer = gguf_tokenizer(vocabulary)
    _write(path, tokenizer.to_str())
    return tokenizer


def _cache_path(cache_key: str) -> Path:
    words = f"{_CACHE_FORMAT} {tokenizers.__version__} {cache_key}"
    name = hashlib.sha256(words.encode()).hexdigest()[:32]
    return env.cache_dir() / "tokenizers" / f"{name}.json"


def _write(path: Path, text: str) -> None:
    """No cache is no fault."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        log.warning("the tokenizer cannot be cached as %s: %s", path, error)
