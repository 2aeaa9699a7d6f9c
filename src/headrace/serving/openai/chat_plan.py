"""The one place where a chat request becomes a `Submit` and a reader of what comes out.

Whatever changes the prompt, the sampling or the reading of the output (tools, structured output,
reasoning) enters here; routes and replies do not know of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.request.messages import Submit
from headrace.request.sampling_params import SamplingParams
from headrace.request.structured_output import StructuredOutput
from headrace.serving.errors import invalid, with_names
from headrace.serving.hidden_states import check_states
from headrace.serving.openai.chat_messages import (
    final_text,
    template_messages,
    template_variables,
)
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.completion_request import CompletionRequest
from headrace.serving.openai.leniency import leave_out_unsupported
from headrace.serving.openai.message_pieces import OutputInterpreter, PlainText
from headrace.serving.openai.parsed_output import ParsedOutput
from headrace.serving.openai.reasoning_count import ReasoningCount
from headrace.serving.openai.refused_fields import check_extra_fields
from headrace.serving.openai.sampling_fields import sampling_params
from headrace.serving.openai.structured_fields import as_part
from headrace.serving.parsers import REASONING_PARSERS, Reading, ToolRequest
from headrace.serving.parsers.choice import NONE
from headrace.serving.prompts import encode, render_chat, tokenizer_of
from headrace.serving.service import Service
from headrace.text.tokenizer import Tokenizer

_ELSEWHERE = dict.fromkeys(
    CompletionRequest.model_fields.keys() - ChatRequest.model_fields.keys(),
    "/v1/completions has it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """What runs, and how its output is read.

    Attributes:
        interpreter: makes one for each choice.
        top_logprobs: `None`: no logprobs are shown.
    """

    submit: Submit
    interpreter: Callable[[], OutputInterpreter]
    top_logprobs: int | None


async def plan_chat(service: Service, body: ChatRequest, name: str) -> ChatPlan:
    """Raises `ApiError` or `RequestError` for what this server or model cannot do."""
    leave_out_unsupported(body, service)
    check_extra_fields(body, service, elsewhere=_ELSEWHERE)
    tools = ToolRequest.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    top = _top_logprobs(body)
    with with_names({"logprobs": "top_logprobs"}):
        params = sampling_params(
            body,
            service.info.default_params,
            logprobs=top,
            max_tokens=_max_tokens(body),
            most_logprobs=service.config.max_logprobs,
        )
    text = await _rendered(service, body)
    reading = _reading(service, body, tools, params, text)
    submit = Submit(
        request_id=name,
        prompt_token_ids=await encode(
            service, text, add_special_tokens=bool(body.add_special_tokens)
        ),
        params=_params_for(reading, params, tokenizer_of(service)),
        prompt_text=text,
        default_max_tokens=None,  # the rest of the context
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    check_states(service, [submit])
    return ChatPlan(
        submit=submit,
        interpreter=_interpreter_maker(reading, body, tokenizer_of(service)),
        top_logprobs=top,
    )


async def chat_prompt(service: Service, body: ChatRequest) -> str:
    """The prompt alone, for those who want its tokens."""
    leave_out_unsupported(body, service)
    return await _rendered(service, body)


async def _rendered(service: Service, body: ChatRequest) -> str:
    """The prompt as the template writes it."""
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    if continues and opens:
        raise invalid(
            "continue_final_message and add_generation_prompt are both true: one goes on with the "
            "last message, the other begins a new one",
            "continue_final_message",
        )
    return await render_chat(
        service,
        template_messages(body),
        tools=body.tools,
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        variables=template_variables(body, tokenizer_of(service).template_variables),
    )


def _reading(
    service: Service,
    body: ChatRequest,
    tools: ToolRequest | None,
    params: SamplingParams,
    prompt: str,
) -> Reading:
    """How the answers are read, and what they are held to."""
    readers = service.readers
    reasoning = readers.reasoning_parser.value
    if body.continue_final_message and reasoning != NONE:
        prompt = REASONING_PARSERS.entries(reasoning)[-1].marker_before(final_text(body))
    return Reading.of(
        tool_parser=readers.tool_parser.value,
        reasoning_parser=reasoning,
        request=tools,
        prompt=prompt,
        content=None if params.structured is None else as_part(params.structured),
        stream_arguments=readers.stream_arguments.value,
    )


def _params_for(reading: Reading, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    special = [
        marker for marker in reading.markers if tokenizer.token_id(marker) in tokenizer.special_ids
    ]
    if special:
        params = replace(params, skip_special_tokens=False)
    if reading.constraint is not None:
        form = StructuredOutput(structural_tag=reading.constraint, special_tokens=special)
        params = replace(params, structured=form)
    return params


def _interpreter_maker(
    reading: Reading, body: ChatRequest, tokenizer: Tokenizer
) -> Callable[[], OutputInterpreter]:
    if body.separate_reasoning is False:
        reading = replace(reading, reasoning_parser=None)
    if reading.tool_parser is None and reading.reasoning_parser is None:
        return PlainText
    return lambda: ParsedOutput(
        reading.interpreter(),
        shows_reasoning=body.include_reasoning is not False,
        reasoning_at_once=body.stream_reasoning is False,
        count=_reasoning_count(reading, tokenizer),
    )


def _reasoning_count(reading: Reading, tokenizer: Tokenizer) -> ReasoningCount | None:
    parser = reading.reasoning_parser
    if parser is None or parser.anywhere:
        return None
    begin, end = (tokenizer.token_id(marker) for marker in parser.pairs[0])
    if begin is None or end is None:
        return None
    return ReasoningCount(
        begin,
        end,
        is_open=bool(parser.end_awaited(reading.prompt)),
        is_space=lambda token: tokenizer.token_text(token).isspace(),
    )


def _max_tokens(body: ChatRequest) -> int | None:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    value: int | None = getattr(body, name)
    if value is not None and value < 1:
        raise invalid(f"{name} is {value}. Allowed: whole numbers of at least 1", name)
    return value


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
