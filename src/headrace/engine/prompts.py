"""From what a caller sends to token ids, options and stop ids; every check that needs the text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.base.errors import RequestError
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.bad_words import BadWords
from headrace.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

NO_TOKENIZER = "This checkpoint has no tokenizer"


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids of a prompt given as text or as ids.

    Raises:
        RequestError: text without a tokenizer, an id outside [0, vocab_size), or nothing at all.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(NO_TOKENIZER, remedy="Send the prompt as a list of token ids")
        ids = tokenizer.encode(prompt)
    else:
        ids = list(prompt)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(f"The prompt holds {token!r}", why="token ids are whole numbers")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"The prompt holds token id {token}",
                why=f"the vocabulary has ids 0 to {vocab_size - 1}",
            )
    if not ids:
        raise RequestError("The prompt is empty", remedy="Send at least one token")
    return ids


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise `RequestError` for options that this model cannot honour."""
    params.check_vocabulary(vocab_size)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and tokenizer is None:
            raise RequestError(
                f"{NO_TOKENIZER}, and {name} works on text",
                remedy="Use stop_token_ids or logit_bias",
            )
    for name in ("return_hidden_states", "return_routed_experts"):
        if getattr(params, name):
            raise RequestError(
                f"{name} is not supported", why="this version returns tokens and logprobs only"
            )


def bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> BadWords | None:
    """The words as token ids, each as it reads at a start and after a space."""
    if not params.bad_words or tokenizer is None:
        return None
    spellings = {
        tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
        for word in params.bad_words
        for prefix in ("", " ")
    }
    return BadWords(sorted(spelling for spelling in spellings if spelling))


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end a sequence of this request."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | eos_token_ids


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling defaults as the checkpoint's generation_config.json states them."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    stated = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    if generation_config.get("do_sample") is False:
        stated["temperature"] = 0.0
    return replace(SamplingParams(), **stated)
