"""The items of an input as the messages of a chat."""

from collections.abc import Mapping
from typing import Any

from headrace.base.shown import shown
from headrace.serving.errors import invalid

Fields = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


def as_messages(instructions: str | None, items: str | list[Fields]) -> list[Fields]:
    """Raises `ApiError`: 400 for an item that this model cannot be told."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        _add(messages, item)
    if not messages:
        raise invalid("input is empty", "input")
    return messages


def _add(messages: list[Fields], item: Mapping[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise invalid(f"A role is {shown(role)}. Allowed: {', '.join(_ROLES)}", "input")
            text = _text(item.get("content"))
            if role == "assistant":
                _said(messages, content=text)
            else:
                messages.append({"role": role, "content": text})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _said(messages, tool_calls=[call])
        case "function_call_output":
            told = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
            messages.append({"role": "tool", **told})
        case "reasoning":
            if thought := _text(item.get("content") or item.get("summary") or ""):
                _said(messages, reasoning_content=thought)
        case kind:
            raise invalid(f"input has an item of type {shown(kind)}, which is not here", "input")


def _said(messages: list[Fields], **said: Any) -> None:
    """Reasoning, text and calls that follow each other are one message of the assistant."""
    (name, value), *_ = said.items()
    last = messages[-1] if messages else {}
    goes_on = last.get("role") == "assistant" and "tool_calls" not in last
    if name == "tool_calls" and last.get("role") == "assistant":
        last[name] = [*last.get(name, ()), *value]
    elif name == "content" and goes_on and not last["content"]:
        last[name] = value
    else:
        messages.append({"role": "assistant", "content": "", **said})


def _text(content: object) -> str:
    """A text, or parts of text as one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"input has {shown(content)} for a text or a list of parts", "input")
    texts = []
    for part in content:
        known = isinstance(part, Mapping) and part.get("type") in (*_TEXTS, "refusal")
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if not known or not isinstance(text, str):
            raise invalid(f"input has {shown(part)}; this model reads parts of text", "input")
        texts.append(text)
    return "\n".join(texts)
