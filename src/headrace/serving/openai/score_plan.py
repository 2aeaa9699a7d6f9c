"""From a request for scores to what runs: a token behind each item, or a vector of each text."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.request.messages import Submit
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams
from headrace.serving.errors import ApiError, check_count, invalid, with_names
from headrace.serving.openai.field_types import Prompt
from headrace.serving.openai.prompt_submits import submits_of
from headrace.serving.openai.refused_fields import check_extra_fields
from headrace.serving.openai.score_request import ScoreRequest
from headrace.serving.service import Service

_OF_TOKENS = ("query", "items", "label_token_ids")
_OF_TEXTS = ("text_1", "text_2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan:
    """What runs.

    Attributes:
        submits: one per item, or one per text.
        labels: ids whose probabilities are asked for; empty: likeness of texts is.
        pairs: places of the texts that are compared.
    """

    submits: Sequence[Submit]
    labels: Sequence[int] = ()
    pairs: Sequence[tuple[int, int]] = ()


async def plan_scores(service: Service, body: ScoreRequest, name: str) -> ScorePlan:
    """Raises `ApiError` or `RequestError` for what this server or model cannot do."""
    check_extra_fields(body, service)
    given = [field for field in (*_OF_TOKENS, *_OF_TEXTS) if getattr(body, field) is not None]
    if given == list(_OF_TOKENS):
        return await _plan_tokens(service, body, name)
    if given == list(_OF_TEXTS):
        return await _plan_texts(service, body, name)
    raise invalid(
        f"Send {', '.join(_OF_TOKENS)}, or {' and '.join(_OF_TEXTS)}; here are "
        f"{', '.join(given) or 'none of them'}",
        given[0] if given else "query",
    )


async def _plan_tokens(service: Service, body: ScoreRequest, name: str) -> ScorePlan:
    query, items, labels = body.query, body.items or (), body.label_token_ids or ()
    if not labels:
        raise invalid("label_token_ids is empty", "label_token_ids")
    _check_size(service, query or "", items)
    prompts: list[Prompt] = []
    for item in items:
        first, second = (item, query) if body.item_first else (query, item)
        if type(first) is not type(second):
            raise invalid("query and items must both be texts, or both token ids", "items")
        prompts.append(first + second)  # type: ignore[operator]
    with with_names({"logprob_token_ids": "label_token_ids"}):
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=labels)
    size = service.info.vocab_size
    if max(labels) >= size:
        told = f"label_token_ids is {max(labels)}. Allowed: token ids in [0, {size})"
        raise invalid(told, "label_token_ids")
    submits = await submits_of(service, body, name, prompts, field="items", params=params)
    return ScorePlan(submits=submits, labels=labels)


def _check_size(service: Service, query: Prompt, items: Sequence[Prompt]) -> None:
    """Bound the prompts before they are made: each holds the query again, so that a small body
    could ask for any amount of memory."""
    _check_texts(service, items)
    most, size = service.config.max_body_bytes, len(query) * len(items) + sum(map(len, items))
    if size > most:
        raise ApiError(
            413,
            f"The query and the items make prompts of {size:,} characters or ids together; at most "
            f"{most:,} go, the option max_body_bytes. Send fewer items in one request",
            param="items",
            code="body_too_large",
        )


def _check_texts(service: Service, prompts: Sequence[Prompt]) -> None:
    told = f"The request has {len(prompts)} texts"
    check_count(len(prompts), service.config.max_prompts, told)


async def _plan_texts(service: Service, body: ScoreRequest, name: str) -> ScorePlan:
    first, second = (
        [texts] if isinstance(texts, str) else texts or [] for texts in (body.text_1, body.text_2)
    )
    if not first or len(first) not in (1, len(second)):
        raise invalid(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; send one and many, or as "
            "many of the one as of the other",
            "text_1",
        )
    prompts = [*first, *second]
    _check_texts(service, prompts)
    submits = await submits_of(
        service, body, name, prompts, field="text_1", pooling=PoolingParams()
    )
    pairs = [(place % len(first), len(first) + place) for place in range(len(second))]
    return ScorePlan(submits=submits, pairs=pairs)
