"""From a native request to what runs."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.request.messages import Submit
from headrace.request.other_words import FIELD_WORDS, FORMS, SGLANG_NAMES
from headrace.request.sampling_params import SamplingParams
from headrace.serving.errors import check_count, invalid, of_prompt
from headrace.serving.hidden_states import check_states, most_new_tokens
from headrace.serving.native.generate_request import GenerateRequest
from headrace.serving.openai.field_types import Prompt, check_id, listed_prompts
from headrace.serving.openai.refused_fields import REFUSED, check_extra_fields
from headrace.serving.openai.sampling_fields import token_biases
from headrace.serving.openai.structured_fields import of_plain_fields, one_form
from headrace.serving.prompts import encode
from headrace.serving.service import Service

DEFAULT_MAX_TOKENS = 128  # SGLang's

_KNOWN = frozenset(entry.name for entry in fields(SamplingParams)) - {
    *("logprobs", "prompt_logprobs"),  # fields of the request
    "structured",  # comes under the names that SGLang has for forms
}
_ELSEWHERE = dict.fromkeys(
    (_KNOWN | SGLANG_NAMES.keys() | FORMS.keys()) - GenerateRequest.model_fields.keys(),
    "it belongs in sampling_params",
)
_STATES = "return_hidden_states"
_MOST_TOKENS = ("max_new_tokens", "max_tokens")
_WITHOUT_EFFECT = ("spaces_between_special_tokens",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsAsked:
    """Logprobs of one prompt. `start` is its first token to be told of; `None`: outputs only."""

    start: int | None
    top: int
    ids: tuple[int, ...]
    with_text: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePlan:
    """What runs for one request; lists have an entry per prompt.

    Attributes:
        rids: ids that the replies carry. logprobs: `None` where none are shown.
        is_batch: the reply is a list.
        drops_output: only the prompt is wanted (max_new_tokens 0); a token is made, since every
            forward makes one.
    """

    name: str
    submits: tuple[Submit, ...]
    rids: tuple[str, ...]
    logprobs: tuple[LogprobsAsked | None, ...]
    is_batch: bool
    drops_output: tuple[bool, ...]


async def plan_generate(service: Service, body: GenerateRequest, fresh: str) -> GeneratePlan:
    """Raises `ApiError` or `RequestError` for what this server or model cannot do.

    Args:
        fresh: an id that nothing else has.
    """
    check_extra_fields(body, service, elsewhere=_ELSEWHERE)
    prompts, is_batch = _prompts(body)
    count = len(prompts)
    check_count(count, service.config.max_prompts, f"The request has {count} prompts", "input_ids")
    rids = _rids(body, count, fresh)
    submits, logprobs, drops = [], [], []
    for place, prompt in enumerate(prompts):
        if place:
            await asyncio.sleep(0)  # a thousand prompts leave room for what others ask
        with of_prompt(place if is_batch else None):
            asked = _logprobs(body, place, count, service.config.max_logprobs)
            given = _of(body.sampling_params, place, count, "sampling_params") or {}
            drops.append(any(_is_zero(given.get(name)) for name in _MOST_TOKENS))
            if drops[-1]:
                given = {**given, **dict.fromkeys(_MOST_TOKENS, 1)}
            params = _with_logprobs(_params(given, service), asked)
            params = _with_states(params, body, place, count)
            if _of(body.return_routed_experts, place, count, "return_routed_experts"):
                params = replace(params, return_routed_experts=True)
            ids = (
                await encode(service, prompt, add_special_tokens=True)
                if isinstance(prompt, str)
                else prompt
            )
        logprobs.append(asked)
        submits.append(
            Submit(
                request_id=rids[place],
                prompt_token_ids=ids,
                params=params,
                prompt_text=prompt if isinstance(prompt, str) else None,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                priority=body.priority or 0,
                cache_salt=_of(body.extra_key, place, count, "extra_key") or "",
            )
        )
    check_states(service, submits)
    _check_routing(service, submits)
    return GeneratePlan(
        name=rids[0] if count == 1 else fresh,
        submits=tuple(submits),
        rids=tuple(rids),
        logprobs=tuple(logprobs),
        is_batch=is_batch,
        drops_output=tuple(drops),
    )


def _check_routing(service: Service, submits: Sequence[Submit]) -> None:
    info, most = service.info, service.config.max_routed_tokens
    tokens = sum(
        submit.params.n * (len(submit.prompt_token_ids) + most_new_tokens(submit, info))
        for submit in submits
        if submit.params.return_routed_experts
    )
    if tokens > most:
        raise invalid(
            f"return_routed_experts asks for those of up to {tokens:,} tokens; this server puts at "
            f"most {most:,} into an answer (max_routed_tokens). Ask for fewer at a time",
            "return_routed_experts",
        )


def _prompts(body: GenerateRequest) -> tuple[list[Prompt], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("Send text or input_ids, one of them", "text")
    field, value = "text", body.text
    if value is None:
        field, value = "input_ids", body.input_ids
        parts = value if isinstance(value, list) else [""]
        if isinstance(value, str) or any(isinstance(part, str) for part in parts):
            raise invalid("input_ids is a list of token ids, or a list of such lists", field)
    try:
        prompts = listed_prompts(value)
    except ValueError as error:
        raise invalid(f"{field} {error}", field) from None
    return prompts, isinstance(value, list) and not isinstance(value[0], int)


def _rids(body: GenerateRequest, count: int, fresh: str) -> list[str]:
    given = body.rid
    if given is None:
        return [fresh] if count == 1 else [f"{fresh}/{place}" for place in range(count)]
    rids = [given] if isinstance(given, str) else given
    if isinstance(given, str) and count > 1:
        rids = [f"{given}/{place}" for place in range(count)]
    if len(rids) != count or len(set(rids)) != count:
        raise invalid(f"rid needs {count} different texts, one per prompt", "rid")
    try:
        return [check_id(rid) for rid in rids]
    except ValueError as error:
        raise invalid(f"rid {error}", "rid") from None


def _of(value: Any, place: int, count: int, name: str) -> Any:
    """The part of a field that is about one prompt; what is no list is about all."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise invalid(f"{name} has {len(value)} entries for {count} prompts", name)
    return value[place]


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0  # False is none


def _params(given: Mapping[str, Any], service: Service) -> SamplingParams:
    asked: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    for name, value in given.items():
        ours = SGLANG_NAMES.get(name, name)
        if name in _WITHOUT_EFFECT or value is None:
            continue
        if name in FORMS:
            forms |= {name: value}
        elif name in REFUSED and ours not in _KNOWN:
            if value not in (False, [], {}, ""):
                raise invalid(f"{name} is not supported: {REFUSED[name]}", name)
        elif ours not in _KNOWN:
            answer = FIELD_WORDS.answer(name, _KNOWN)
            hint = f" ({answer})" if answer else ""
            raise invalid(
                f"sampling_params holds {name[:80]!r}, which is not known{hint}", name[:80]
            )
        elif ours == "logit_bias" and isinstance(value, dict):
            asked[ours] = token_biases(value)
        else:
            asked[ours] = _states_asked(value) if ours == _STATES else value
    asked["structured"] = one_form(list(of_plain_fields(forms)))
    return replace(service.info.default_params, **asked)


def _logprobs(body: GenerateRequest, place: int, count: int, most: int) -> LogprobsAsked | None:
    if not _of(body.return_logprob, place, count, "return_logprob"):
        return None
    start = _of(body.logprob_start_len, place, count, "logprob_start_len")
    top = _of(body.top_logprobs_num, place, count, "top_logprobs_num") or 0
    if not 0 <= top <= most:
        raise invalid(f"top_logprobs_num is {top}. Allowed: 0 to {most}", "top_logprobs_num")
    if start is not None and start < -1:
        raise invalid(f"logprob_start_len is {start}. Allowed: -1 and up", "logprob_start_len")
    ids = body.token_ids_logprob or []
    if ids and isinstance(ids[0], list):
        ids = _of(ids, place, count, "token_ids_logprob")
    return LogprobsAsked(
        start=None if start in (None, -1) else start,
        top=top,
        ids=tuple(ids),
        with_text=bool(body.return_text_in_logprobs),
    )


def _states_asked(value: Any) -> Any:
    """True means the states of all positions here, as it does in SGLang."""
    return "all" if value is True else value


def _with_states(
    params: SamplingParams, body: GenerateRequest, place: int, count: int
) -> SamplingParams:
    asked = _of(body.return_hidden_states, place, count, _STATES)
    changes: dict[str, Any] = {}
    if asked is not None:
        changes[_STATES] = _states_asked(asked)
    if body.hidden_state_layers is not None:
        changes["hidden_state_layers"] = body.hidden_state_layers
    return replace(params, **changes) if changes else params


def _with_logprobs(params: SamplingParams, asked: LogprobsAsked | None) -> SamplingParams:
    if asked is None:
        return params
    return replace(
        params,
        logprobs=asked.top,
        prompt_logprobs=None if asked.start is None else asked.top,
        logprob_token_ids=asked.ids or params.logprob_token_ids,
    )
