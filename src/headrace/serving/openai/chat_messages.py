"""What a chat template is given: messages and variables of a request."""

from typing import Any

from headrace.base.shown import shown
from headrace.serving.errors import invalid
from headrace.serving.openai.chat_request import ChatRequest, Message

# Names that a template is given by the server.
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_OF_THINKING = ("reasoning_effort", "enable_thinking")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def template_messages(body: ChatRequest) -> list[dict[str, Any]]:
    return [_as_template_sees(message) for message in body.messages]


def template_variables(body: ChatRequest, known: frozenset[str]) -> dict[str, Any]:
    """chat_template_kwargs, and what reasoning_effort means to this template.

    Args:
        known: names that the template asks for.

    Raises:
        ApiError: 400 for names of the server, or an effort that the template cannot be told
            ("none" need not be).
    """
    variables = dict(body.chat_template_kwargs or {})
    for reserved in _RESERVED:
        if reserved in variables:
            raise invalid(
                f"chat_template_kwargs holds {reserved}, which has a field of its own",
                "chat_template_kwargs",
            )
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise invalid(
            f"reasoning_effort is {shown(effort)}. Allowed: {', '.join(EFFORTS)}",
            "reasoning_effort",
        )
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort, **variables}
    if "enable_thinking" in known:
        return {"enable_thinking": effort != "none", **variables}
    if effort == "none":
        return variables  # clients say so to every model; one without a switch has nothing to do
    raise invalid(
        "reasoning_effort is not supported: the chat template of this model knows neither it nor "
        "enable_thinking",
        "reasoning_effort",
    )


def knows_effort(known: frozenset[str]) -> bool:
    """Whether a template that asks for these names can be told of an effort."""
    return not known.isdisjoint(_OF_THINKING)


def final_text(body: ChatRequest) -> str:
    """Text of the last message."""
    content = body.messages[-1].content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _as_template_sees(message: Message) -> dict[str, Any]:
    """Templates know `system`, not the newer name of the same role; many add up content without
    asking if there is any."""
    plain = {"content": "", **message.model_dump(exclude_none=True)}
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain
