"""From a completion request to what runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.request.messages import Submit
from headrace.request.other_words import FIELD_WORDS
from headrace.serving.errors import check_count, invalid, of_prompt
from headrace.serving.hidden_states import check_states
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.completion_request import CompletionRequest
from headrace.serving.openai.field_types import Prompt
from headrace.serving.openai.leniency import leave_out_unsupported
from headrace.serving.openai.prompt_submits import submits_of
from headrace.serving.openai.refused_fields import OF_CHATS, check_extra_fields
from headrace.serving.openai.sampling_fields import sampling_params
from headrace.serving.prompts import decode
from headrace.serving.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_ELSEWHERE = dict.fromkeys(
    ChatRequest.model_fields.keys()
    - CompletionRequest.model_fields.keys()
    - FIELD_WORDS.renamed.keys(),  # these have another name here
    OF_CHATS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPlan:
    """What runs for one request.

    Attributes:
        submits: one per prompt. echoes: text of each prompt when it is to be shown, else "".
        shown: choices per prompt in the reply; less than `params.n` when the best are picked.
        top_logprobs: `None`: no logprobs are shown.
        drops_output: only the prompt is wanted (echo with max_tokens 0); a token is made since
            nothing runs without, and not shown.
    """

    submits: tuple[Submit, ...]
    echoes: tuple[str, ...]
    shown: int
    top_logprobs: int | None
    drops_output: bool


async def plan_completion(service: Service, body: CompletionRequest, name: str) -> CompletionPlan:
    """Raises `ApiError` or `RequestError` for what this server or model cannot do."""
    leave_out_unsupported(body, service)
    check_extra_fields(body, service, elsewhere=_ELSEWHERE)
    shown = body.n or 1
    made = shown if body.best_of is None else body.best_of
    _check_best_of(body, shown, made)
    drops_output = body.max_tokens == 0
    if drops_output and not body.echo:
        raise invalid("max_tokens is 0. Allowed: at least 1, or 0 with echo", "max_tokens")
    params = sampling_params(
        body,
        service.info.default_params,
        logprobs=body.logprobs,
        max_tokens=1 if drops_output else body.max_tokens,
        most_logprobs=service.config.max_logprobs,
    )
    if made > shown:
        params = replace(params, n=made, logprobs=params.logprobs or 0)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
    prompts: list[Prompt] = body.prompt
    told = f"The request has {len(prompts)} prompts with {made} continuations each"
    check_count(len(prompts) * made, service.config.max_prompts, told, "prompt")
    submits = await submits_of(
        service,
        body,
        name,
        prompts,
        field="prompt",
        params=params,
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )
    check_states(service, submits)
    return CompletionPlan(
        submits=tuple(submits),
        echoes=await _echoes(service, prompts) if body.echo else ("",) * len(prompts),
        shown=shown,
        top_logprobs=body.logprobs,
        drops_output=drops_output,
    )


async def _echoes(service: Service, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """The text of each; of token ids without a tokenizer there is none."""
    texts = []
    for place, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else ""
        if not isinstance(prompt, str) and service.tokenizer is not None:
            with of_prompt(None if len(prompts) == 1 else place, "prompt"):
                text = await decode(service, prompt, skip_special_tokens=False)
        texts.append(text)
    return tuple(texts)


def _check_best_of(body: CompletionRequest, shown: int, made: int) -> None:
    if made < shown:
        raise invalid(f"best_of is {made}, less than n, which is {shown}", "best_of")
    if made > shown and body.stream:
        raise invalid("best_of above n cannot be streamed", "best_of")
