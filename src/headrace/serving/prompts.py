"""From texts and conversations to token ids, beside the event loop where it takes long."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headrace.base.errors import RequestError, TooLongError, longest_context
from headrace.checkpoint.opening import open_tokenizer
from headrace.config.engine_config import EngineConfig
from headrace.serving.deadline import within_seconds
from headrace.serving.errors import ApiError
from headrace.serving.service import Service
from headrace.text.build import build_tokenizer
from headrace.text.tokenizer import Tokenizer

QUICK_CHARACTERS = 4096  # a text up to this is tokenised in well under a millisecond
NO_TOKENIZER = "This checkpoint has no tokenizer"


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that the engine of this config has; `None` for a checkpoint without one."""
    source = open_tokenizer(config)
    return None if source is None else build_tokenizer(source)


def tokenizer_of(service: Service) -> Tokenizer:
    """Raises `RequestError` for a checkpoint without tokenizer, 503 before the engine is ready."""
    service.started_engine  # noqa: B018 - raises while the model loads
    if service.tokenizer is None:
        raise RequestError(NO_TOKENIZER, remedy="Send token ids")
    return service.tokenizer


async def encode(
    service: Service, text: str, *, add_special_tokens: bool, must_fit: bool = True
) -> list[int]:
    """Token ids of a text.

    Args:
        must_fit: it is a prompt; one that is far too long for the context is not read through.

    Raises:
        RequestError: no tokenizer, no valid Unicode, or too long.
    """
    tokenizer = tokenizer_of(service)
    most = service.info.max_model_len if must_fit else None
    call = partial(_encoded, tokenizer, text, add_special_tokens, most)
    return call() if len(text) <= QUICK_CHARACTERS else await asyncio.to_thread(call)


def _encoded(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most_tokens: int | None
) -> list[int]:
    if most_tokens is not None and len(text) > max(QUICK_CHARACTERS, most_tokens):
        longest = tokenizer.longest_piece
        if longest is not None and len(text) > most_tokens * longest:
            raise TooLongError(
                f"The prompt has {len(text)} characters",
                why=f"{longest_context(most_tokens)}, of at most {longest} bytes each",
                remedy="Shorten the prompt",
            )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def decode(service: Service, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Text of token ids; ids out of the vocabulary are the sender's fault.

    Raises:
        RequestError: no tokenizer, or an id out of the vocabulary.
    """
    tokenizer, size = tokenizer_of(service), service.info.vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise RequestError(
                f"tokens holds {token}", why=f"the vocabulary has ids 0 to {size - 1}"
            )
    call = partial(tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens)
    return call() if len(ids) <= QUICK_CHARACTERS else await asyncio.to_thread(call)


async def render_chat(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt of a conversation as the model's template writes it.

    Raises:
        RequestError: no template, or it refuses these messages.
        ApiError: 400, rendering took longer than template_seconds.
    """
    call = partial(
        tokenizer_of(service).apply_chat_template,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )
    seconds = service.config.template_seconds
    async with service.rendering:
        try:
            return await within_seconds(seconds, call)
        except TimeoutError:
            raise ApiError(
                400, f"The chat template took more than {seconds} s for these messages"
            ) from None
