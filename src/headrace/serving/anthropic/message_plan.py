"""From a request for a message, by way of the chat that it comes to, to what runs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from headrace.base.shown import shown
from headrace.request.messages import Submit
from headrace.serving.anthropic.message_request import CountRequest, MessageRequest, TurnOfTalk
from headrace.serving.errors import invalid, of_fields, with_names
from headrace.serving.openai.chat_plan import ChatPlan, chat_prompt, plan_chat
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.refused_fields import OF_CHATS, check_extra_fields
from headrace.serving.service import Service

Fields = dict[str, Any]

# Of chats -> of messages, for what is told of them.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
_ELSEWHERE = dict.fromkeys(
    ChatRequest.model_fields.keys() - MessageRequest.model_fields.keys(), OF_CHATS
)
_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def plan_message(service: Service, body: MessageRequest, name: str) -> ChatPlan:
    """Raises `ApiError` for what this server or model cannot do."""
    with with_names(_NAMES):
        plan = await plan_chat(service, _as_chat(body, service), name)
    _end_with_the_context(plan.submit, service.info.max_model_len)
    return plan


async def message_prompt(service: Service, body: CountRequest) -> str:
    """The prompt alone. Raises likewise."""
    with with_names(_NAMES):
        return await chat_prompt(service, _as_chat(body, service))


def _end_with_the_context(submit: Submit, longest: int) -> None:
    """Agents ask for as many tokens as the largest models give, whatever the prompt. Anthropic's
    newer models then end where the context does, and say so."""
    room = longest - len(submit.prompt_token_ids)
    if 0 < room < (submit.params.max_tokens or 0):
        submit.params = replace(submit.params, max_tokens=room)


def _as_chat(body: CountRequest, service: Service) -> ChatRequest:
    """The same in OpenAI's terms.

    Raises:
        ApiError: 400 for what has no meaning here.
    """
    check_extra_fields(body, service, elsewhere=_ELSEWHERE)
    refuses = service.config.refuse_unsupported
    messages = [each for turn in body.messages for each in _messages(turn)]
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": _text(body.system, "system")})
    fields: Fields = {"messages": messages, **_tools(body, refuses), **_thinking(body.thinking)}
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "tool_calls" not in last:
        fields["continue_final_message"] = bool(last["content"])
    if isinstance(body, MessageRequest):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "response_format": _format((body.output_config or {}).get("format")),
        }
    with of_fields():
        return ChatRequest.model_validate(fields)


def _messages(turn: TurnOfTalk) -> Iterator[Fields]:
    """One message, or the results of tools and what the user says beside them."""
    if turn.role not in _ROLES:
        raise invalid(f"A role is {shown(turn.role)}. Allowed: {', '.join(_ROLES)}", "messages")
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    texts, calls, thoughts = [], [], []
    for block in turn.content:
        match block.get("type"), turn.role:
            case "text", _:
                texts.append(_text([block], "messages"))
            case "tool_result", "user":
                yield {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _text(block.get("content") or "", "messages"),
                }
            case "tool_use", "assistant":
                calls.append(_call(block))
            case "thinking", "assistant":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking", "assistant":
                continue  # nobody here can read it
            case kind, role:
                raise invalid(f"A block of {role} is of type {shown(kind)}", "messages")
    message: Fields = {"role": turn.role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if texts or calls or thoughts or not turn.content:
        yield message


def _call(block: Mapping[str, Any]) -> Fields:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _text(content: object, name: str) -> str:
    """A text, or blocks of text as one."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        is_text = isinstance(block, Mapping) and block.get("type") == "text"
        text = block.get("text") if isinstance(block, Mapping) else None
        if not is_text or not isinstance(text, str):
            raise invalid(
                f"{name} holds {shown(block)}; this model reads text blocks, with a text", name
            )
        texts.append(text)
    return "\n".join(texts)


def _tools(body: CountRequest, refuses: bool) -> Fields:
    fields: Fields = {}
    if body.tools:
        fields["tools"] = [_tool(tool, refuses) for tool in body.tools]
    choice = body.tool_choice
    if choice is None:
        return fields
    kind = choice.get("type")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise invalid(f"tool_choice.type is {shown(kind)}. Allowed: auto, any, tool, none")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: Mapping[str, Any], refuses: bool) -> Fields:
    if tool.get("type") not in (None, "custom"):
        if not refuses:
            return dict(tool)  # leniency leaves it out
        raise invalid(f"A tool is of type {shown(tool['type'])}, which is not here", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _format(asked: object) -> object:
    """A schema has no name here, and OpenAI's form must have one."""
    if isinstance(asked, Mapping) and asked.get("type") == "json_schema":
        described = {"name": "output", "schema": asked.get("schema"), "strict": True}
        return {"type": "json_schema", "json_schema": described}
    return asked


def _thinking(asked: Mapping[str, Any] | None) -> Fields:
    """Its budget is not kept: max_tokens bounds reasoning and answer together."""
    kind = None if asked is None else asked.get("type")
    match kind:
        case None if asked is None:
            return {}
        case "enabled" | "adaptive":
            return {"chat_template_kwargs": {"enable_thinking": True}}
        case "disabled":
            return {"reasoning_effort": "none"}
    raise invalid(f"thinking.type is {shown(kind)}. Allowed: enabled, adaptive, disabled")
