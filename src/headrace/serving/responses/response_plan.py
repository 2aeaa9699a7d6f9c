"""From a request for a response, by way of the chat that it comes to, to what runs."""

from collections.abc import Mapping
from typing import Any

from headrace.base.shown import shown
from headrace.serving.errors import invalid, of_fields, with_names
from headrace.serving.openai.chat_plan import ChatPlan, plan_chat
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.refused_fields import (
    NEUTRAL,
    OF_CHATS,
    REFUSED,
    check_extra_fields,
)
from headrace.serving.responses.input_items import as_messages
from headrace.serving.responses.response_request import ResponseRequest
from headrace.serving.service import Service

Fields = dict[str, Any]

# Of chats -> of responses, for what is told of them.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_ELSEWHERE = dict.fromkeys(
    ChatRequest.model_fields.keys()
    - ResponseRequest.model_fields.keys()
    - {"stream_options"},  # it has others here, none of which changes an answer
    OF_CHATS,
)
_NOT_STORED = "nothing is stored here; send the whole conversation as input"
_OF_FUNCTION = ("name", "description", "parameters", "strict")


async def plan_response(service: Service, body: ResponseRequest, name: str) -> ChatPlan:
    """Raises `ApiError` for what this server or model cannot do."""
    with with_names(_NAMES):
        return await plan_chat(service, _as_chat(body, service), name)


def _as_chat(body: ResponseRequest, service: Service) -> ChatRequest:
    """The same in the terms of chats.

    Raises:
        ApiError: 400 for what has no meaning here.
    """
    check_extra_fields(body, service, elsewhere=_ELSEWHERE)
    refuses = service.config.refuse_unsupported
    _check_what_is_not_here(body)
    if (body.text or {}).get("verbosity") not in (None, *NEUTRAL["verbosity"]):
        if refuses:
            raise invalid(f"text.verbosity is not supported: {REFUSED['verbosity']}", "text")
        service.ignored.add("text.verbosity", REFUSED["verbosity"])
    fields: Fields = {
        "messages": as_messages(body.instructions, body.input),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "response_format": _format((body.text or {}).get("format")),
    }
    if body.tools:
        fields["tools"] = [_tool(tool, refuses) for tool in body.tools]
        fields["tool_choice"] = _choice(body.tool_choice)
    elif body.tool_choice not in (None, "auto", "none"):
        raise invalid("tool_choice needs tools", "tool_choice")
    with of_fields():
        return ChatRequest.model_validate(fields)


def _check_what_is_not_here(body: ResponseRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise invalid(f"{name} is not supported: {_NOT_STORED}", name)
    if (body.model_extra or {}).get("prompt") is not None:
        raise invalid("prompt is not supported: no templates are stored here", "prompt")
    if body.background:
        raise invalid("background is not supported: " + _NOT_STORED, "background")
    if body.truncation not in (None, "disabled"):
        raise invalid("truncation is not supported: prompts are never truncated", "truncation")
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise invalid(f"reasoning.effort is {shown(effort)}. Allowed: a text", "reasoning.effort")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise invalid("logprobs are not supported here; chat completions have them", "include")


def _tool(tool: Mapping[str, Any], refuses: bool) -> Fields:
    if tool.get("type") != "function":
        if not refuses:
            return dict(tool)  # leniency leaves it out
        kind = shown(tool.get("type"))
        raise invalid(f"A tool is of type {kind}; functions are what this server has", "tools")
    function = {name: tool[name] for name in _OF_FUNCTION if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(asked: object) -> Any:
    """OpenAI's two APIs nest a schema differently."""
    if isinstance(asked, Mapping) and asked.get("type") == "json_schema":
        described = {name: value for name, value in asked.items() if name != "type"}
        return {"type": "json_schema", "json_schema": described}
    return asked
