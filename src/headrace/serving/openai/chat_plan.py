"""The one place where a chat request becomes a `Submit` and a reader of what comes out.

Whatever changes the prompt, the sampling or the reading of the output (tools, structured output,
reasoning) enters here; routes and replies do not know of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.request.messages import Submit
from headrace.serving.errors import invalid
from headrace.serving.openai.chat_request import ChatRequest, Message
from headrace.serving.openai.interpreter import OutputInterpreter, PlainText
from headrace.serving.openai.refused_fields import check_extra_fields
from headrace.serving.openai.sampling_fields import sampling_params
from headrace.serving.prompts import encode, render_chat
from headrace.serving.service import Service

# Names that a template is given by the server.
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


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
    check_extra_fields(body, service.unknown_fields)
    _check_tools(body)
    top = _top_logprobs(body)
    params = sampling_params(
        body,
        service.info.default_params,
        logprobs=top,
        max_tokens=_max_tokens(body),
        most_logprobs=service.config.max_logprobs,
    )
    text = await chat_prompt(service, body)
    return ChatPlan(
        submit=Submit(
            request_id=name,
            prompt_token_ids=await encode(
                service, text, add_special_tokens=bool(body.add_special_tokens)
            ),
            params=params,
            prompt_text=text,
            default_max_tokens=None,  # the rest of the context
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        ),
        interpreter=PlainText,
        top_logprobs=top,
    )


async def chat_prompt(service: Service, body: ChatRequest) -> str:
    """The prompt as the template writes it."""
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    if continues and opens:
        raise invalid(
            "continue_final_message and add_generation_prompt are both true: one goes on with the "
            "last message, the other begins a new one",
            "continue_final_message",
        )
    variables = body.chat_template_kwargs or {}
    for reserved in _RESERVED:
        if reserved in variables:
            raise invalid(
                f"chat_template_kwargs holds {reserved}, which has a field of its own",
                "chat_template_kwargs",
            )
    return await render_chat(
        service,
        [_as_template_sees(message) for message in body.messages],
        tools=body.tools,
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        variables=variables,
    )


def _as_template_sees(message: Message) -> dict[str, Any]:
    """Templates know `system`, not the newer name of the same role."""
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain


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


def _check_tools(body: ChatRequest) -> None:
    if body.tools is not None and not body.tools:
        raise invalid("tools is an empty list; leave it out", "tools")
    choice = body.tool_choice
    if choice is not None and not body.tools and choice != "none":
        raise invalid("tool_choice needs tools", "tool_choice")
    if body.tools and choice != "none":
        raise invalid(
            "This version does not read tool calls out of an answer; with tool_choice none the "
            "template still shows the tools to the model",
            "tools",
        )
