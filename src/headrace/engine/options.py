"""Options of requests, held against the model that is to honour them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.base.errors import CheckpointError, RequestError
from headrace.batch.rows import MAX_ROW_STOP_IDS
from headrace.config.persona import ModelTraits
from headrace.engine.prompts import NO_TOKENIZER
from headrace.request.pooling_params import POOLINGS, PoolingParams
from headrace.request.sampling_params import SamplingParams
from headrace.runner.assembly import Settled
from headrace.runner.memory_sizes import ITEM_BYTES
from headrace.sampling.bad_words import BadWords
from headrace.sampling.grammar.xgrammar_backend import checked_form, require_xgrammar
from headrace.text.tokenizer import Tokenizer

STATES_SHARE = 1 / 40
"""Of the device's memory: what hidden states of one request may take in a step. They lie in the
part that `mem_fraction` leaves, beside those of others."""

# Of generation_config.json: transformers chooses other tokens by them, and no option here does.
_UNHEEDED = (
    *("bad_words_ids", "begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("guidance_scale", "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams"),
    *("penalty_alpha", "sequence_bias", "stop_strings", "suppress_tokens", "typical_p"),
)
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, [], {})


def checked_stop_ids(
    params: SamplingParams,
    settled: Settled,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
) -> frozenset[int]:
    """Ids that end a sequence of these options, which can be honoured whatever the prompt is.

    Raises:
        RequestError: they cannot.
    """
    traits = settled.persona.traits
    _check_params(params, tokenizer, traits.vocab_size)
    _check_routing(params, traits, is_kept=settled.plan.routed_experts.value)
    ends = stop_ids(params, eos_token_ids)
    check_allowed(params, ends)
    check_structured(params, tokenizer, ends)
    return ends


def _check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise `RequestError` for options that this model cannot honour."""
    params.check_vocabulary(vocab_size)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and tokenizer is None:
            raise RequestError(
                f"{NO_TOKENIZER}, and {name} works on text",
                remedy="Use stop_token_ids or logit_bias",
            )


def _check_routing(params: SamplingParams, traits: ModelTraits, *, is_kept: bool) -> None:
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
    chosen = params.state_layers(traits.num_layers)
    if params.return_hidden_states != "all":
        return
    layers = {*chosen, traits.num_layers}
    rows = min(prompt_length, plan.chunked_prefill_size.value)
    needed = rows * len(layers) * traits.hidden_size * ITEM_BYTES[plan.dtype.value]
    room = int(settled.hardware.memory_bytes * STATES_SHARE)
    if needed > room:
        raise RequestError(
            f"The hidden states of {rows} positions and {len(layers)} layers take {needed:,} bytes",
            why=f"one step may leave {room:,} bytes of them on the device",
            remedy="Ask for fewer layers, or lower chunked_prefill_size",
        )


def settled_pooling(params: PoolingParams, stated: str | None) -> PoolingParams:
    """Options that name a pooling; `stated`: by the checkpoint.

    Raises:
        RequestError: it is left to the checkpoint, which states one that there is not.
    """
    if params.pooling is not None:
        return params
    pooling = stated or "last"
    if pooling not in POOLINGS:
        raise RequestError(
            f"The checkpoint pools embeddings by {pooling}",
            why=f"only {' and '.join(POOLINGS)} are supported",
            remedy="Ask for one of these, and for other vectors than the model was trained for",
        )
    return replace(params, pooling=pooling)


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


def unheeded_defaults(generation_config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the checkpoint's generation_config.json asks for and no request gets by itself."""
    return tuple(name for name in _UNHEEDED if generation_config.get(name) not in _NEUTRAL)
