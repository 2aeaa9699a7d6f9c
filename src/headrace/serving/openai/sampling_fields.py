"""Sampling fields that completions and chat share, and the way to `SamplingParams`.

Types are checked here, by pydantic; ranges by `SamplingParams`, the one place that knows them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.base.errors import RequestError
from headrace.request.sampling_params import MAX_BIASES, SamplingParams
from headrace.serving.errors import invalid
from headrace.serving.openai.field_types import (
    Integers,
    Numbers,
    RequestFields,
    RequestId,
    Texts,
)
from headrace.serving.openai.structured_fields import StructuredFields, structured_output

# Fields that go into `SamplingParams` under their own name.
_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "logprobs_mode",
    "logprob_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "hidden_state_layers",
)


class StreamOptions(BaseModel):
    """Usage in a stream: in one last chunk, or in every chunk."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(RequestFields, StructuredFields):
    """Fields of both routes. `None` is the default of the model, where it states one."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Integers | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Numbers | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Integers | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    logprob_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_hidden_states: bool | None = Field(
        None, description="the state that the last token was drawn from, with its choice"
    )
    hidden_state_layers: Integers | None = Field(
        None, description="which states, 0 the embedding; -1, the default, after the last norm"
    )
    return_tokens_as_token_ids: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingParams,
    *,
    logprobs: int | None,
    max_tokens: int | None,
    most_logprobs: int,
) -> SamplingParams:
    """What the request asks, where it asks nothing what the model's generation config states.

    Raises:
        RequestError, ApiError: a value is out of range, or fields contradict each other.
    """
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs cannot be streamed; send stream: false", "prompt_logprobs")
    asked: dict[str, Any] = {
        name: value for name in _PLAIN if (value := getattr(fields, name)) is not None
    }
    if fields.no_stop_trim is not None:
        asked.setdefault("include_stop_str_in_output", fields.no_stop_trim)
    if fields.logit_bias:
        asked["logit_bias"] = token_biases(fields.logit_bias)
    asked["structured"] = structured_output(fields)
    asked["return_hidden_states"] = "final" if fields.return_hidden_states else "none"
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", fields.prompt_logprobs)):
        if value is not None and value > most_logprobs:
            raise invalid(
                f"{name} is {value}; this server gives at most {most_logprobs} "
                "(--max-logprobs of headrace serve)",
                name,
            )
    return replace(defaults, **asked, logprobs=logprobs, max_tokens=max_tokens)


def token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON has text as keys; here they are token ids."""
    if len(biases) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(biases)} ids; at most {MAX_BIASES} go", "logit_bias")
    if not all(token.isdecimal() for token in biases):  # int() would read " 5" and "1_0" too
        raise RequestError("logit_bias has a key that is no token id")
    return {int(token): value for token, value in biases.items()}
