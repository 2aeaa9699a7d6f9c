"""From what a caller sends to token ids, options and stop ids; every check that needs the text."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from headrace.base.errors import CheckpointError, RequestError
from headrace.batch.rows import MAX_ROW_STOP_IDS
from headrace.config.persona import ModelTraits
from headrace.request.sampling_params import SamplingParams
from headrace.runner.assembly import Settled
from headrace.runner.memory_sizes import ITEM_BYTES
from headrace.sampling.bad_words import BadWords
from headrace.sampling.grammar_xgrammar import checked_form, require_xgrammar
from headrace.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

STATES_SHARE = 1 / 40
"""Of the device's memory: what hidden states of one request may take in a step. They lie in the
part that `mem_fraction` leaves, beside those of others."""

NO_TOKENIZER = "This checkpoint has no tokenizer"


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids of a prompt given as text or as ids.

    Raises:
        RequestError: neither text nor ids, text without a tokenizer, an id outside
            [0, vocab_size), or nothing at all.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(NO_TOKENIZER, remedy="Send the prompt as a list of token ids")
        ids = tokenizer.encode(prompt)
    else:
        ids = _plain_ids(prompt)
    if not ids:
        raise RequestError("The prompt is empty", remedy="Send at least one token")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"The prompt holds token id {token}",
                why=f"the vocabulary has ids 0 to {vocab_size - 1}",
            )
    return ids


def plain(value: Any) -> Any:
    """What an array or a tensor holds, in lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _plain_ids(prompt: object) -> list[int]:
    """The ids as Python's own integers; those of other libraries count, True and False do not."""
    prompt = plain(prompt)
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | set | frozenset):
        raise _no_prompt(prompt)  # they can be read as a list of numbers, and nobody means that
    try:
        tokens: list[Any] = list(prompt)  # type: ignore[call-overload]
    except TypeError:
        raise _no_prompt(prompt) from None
    if set(map(type, tokens)) <= {int}:  # a third of the time that a look at each takes
        return tokens
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise RequestError(
                f"The prompt holds {reprlib.repr(token)}", why="token ids are whole numbers"
            )
    return [int(token) for token in tokens]


def _no_prompt(prompt: object) -> RequestError:
    return RequestError(
        f"The prompt is {reprlib.repr(prompt)}", remedy="Send a text or a list of token ids"
    )


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise `RequestError` for options that this model cannot honour."""
    params.check_vocabulary(vocab_size)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and tokenizer is None:
            raise RequestError(
                f"{NO_TOKENIZER}, and {name} works on text",
                remedy="Use stop_token_ids or logit_bias",
            )


def check_routing(params: SamplingParams, traits: ModelTraits, *, is_kept: bool) -> None:
    """Raise `RequestError` for experts that nobody kept; `is_kept`: since the start."""
    if not params.return_routed_experts or is_kept:
        return
    what = "return_routed_experts cannot be honoured"
    if not traits.moe_layers:
        raise RequestError(what, why=f"the model, a {traits.family}, has no experts")
    raise RequestError(
        what,
        why="the choice of experts is kept from the start or not at all, since graphs record it",
        remedy="Start the engine with enable_return_routed_experts",
    )


def check_states(params: SamplingParams, prompt_length: int, settled: Settled) -> None:
    """Raise `RequestError` for hidden states of layers that the model does not have, and for more
    of them than a step may leave on the device."""
    traits, plan = settled.persona.traits, settled.plan
    layers = {*params.state_layers(traits.num_layers), traits.num_layers}
    if params.return_hidden_states != "all":
        return
    rows = min(prompt_length, plan.chunked_prefill_size.value)
    needed = rows * len(layers) * traits.hidden_size * ITEM_BYTES[plan.dtype.value]
    room = int(settled.hardware.memory_bytes * STATES_SHARE)
    if needed > room:
        raise RequestError(
            f"The hidden states of {rows} positions and {len(layers)} layers take {needed:,} bytes",
            why=f"one step may leave {room:,} bytes of them on the device",
            remedy="Ask for fewer layers, or lower chunked_prefill_size",
        )


def bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> BadWords | None:
    """The words as token ids, each as it reads at a start and after a space.

    Raises:
        RequestError: a word has no tokens.
    """
    if not params.bad_words or tokenizer is None:
        return None
    spellings = set()
    for word in params.bad_words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):  # spaces alone are as they are
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not tokens:
                raise RequestError(f"bad_words has {word!r}", why="it has no tokens in this model")
            spellings.add(tokens)
    return BadWords(sorted(spellings))


def check_structured(
    params: SamplingParams, tokenizer: Tokenizer | None, ends: frozenset[int]
) -> None:
    """Raise `RequestError` where no answer of a form can be made, as far as that is plain before
    its grammar is compiled."""
    if params.structured is None:
        return
    require_xgrammar()
    if tokenizer is None:
        raise RequestError(
            f"{NO_TOKENIZER}, and structured works on text", remedy="Leave structured out"
        )
    if tokenizer.pieces is None:
        raise RequestError(
            "structured is not supported with this tokenizer",
            why="its tokens do not stand for fixed bytes",
        )
    if not ends:
        raise RequestError(
            "structured needs a token that ends the answer",
            why="ignore_eos is set, or the model has no end token",
            remedy="Leave ignore_eos out, or give stop_token_ids",
        )
    checked_form(params.structured)


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end a sequence of this request.

    Raises:
        RequestError: more than a row holds, those of the request and of the model together.
    """
    own = frozenset(params.stop_token_ids)
    ids = own if params.ignore_eos else own | eos_token_ids
    if len(ids) > MAX_ROW_STOP_IDS:
        raise RequestError(
            f"stop_token_ids has {len(own)} ids and the model has {len(eos_token_ids)} end tokens "
            f"of its own: {len(ids)} together",
            why=f"a sequence ends on at most {MAX_ROW_STOP_IDS} different ids",
            remedy="Give fewer stop_token_ids, or ignore_eos to do without the model's",
        )
    return ids


def check_allowed(params: SamplingParams, ends: frozenset[int]) -> None:
    """Raise `RequestError` where no first token may be made: end tokens wait for min_tokens."""
    if params.min_tokens and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
        raise RequestError(
            f"allowed_token_ids has end tokens only and min_tokens is {params.min_tokens}",
            why="end tokens are not allowed before min_tokens",
            remedy="Allow others, or leave min_tokens out",
        )


def check_end_tokens(eos_token_ids: frozenset[int]) -> None:
    """Raise `CheckpointError` for a model whose own end tokens fill more than a row."""
    if len(eos_token_ids) > MAX_ROW_STOP_IDS:
        raise CheckpointError(
            f"The checkpoint states {len(eos_token_ids)} end tokens",
            why=f"a sequence ends on at most {MAX_ROW_STOP_IDS} different ids",
            remedy="Shorten eos_token_id in its config.json or generation_config.json",
        )


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling defaults as the checkpoint's generation_config.json states them.

    Raises:
        CheckpointError: a value that no request could ask for.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    stated = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    if generation_config.get("do_sample") is False:
        stated["temperature"] = 0.0
    try:
        return replace(SamplingParams(), **stated)
    except RequestError as error:
        raise CheckpointError(
            f"generation_config.json: {error.what}", why=error.why, remedy=error.remedy
        ) from error
