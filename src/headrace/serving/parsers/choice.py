"""Which parsers fit a checkpoint."""

from typing import Any

from headrace.base.decision import Decision
from headrace.base.registry import Registry
from headrace.serving.parsers.reasoning import REASONING_PARSERS
from headrace.serving.parsers.tool_parser import TOOL_PARSERS

NONE = "none"

# What a chat template writes -> the parser that reads it. The first that all stand in it counts.
_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("<tool_call>", "arguments"), "hermes"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_v3"),
    (("<|python_start|>",), "pythonic"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
    (("<|start_header_id|>", "ipython"), "llama3_json"),
)
_REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("[THINK]",), "mistral"),
    (("<think>",), "think"),
    (("</think>",), "deepseek_r1"),
)
# Formats other than these that share a sign with one of them.
_OTHER_SIGNS = ("<arg_key>", "<|tool_call_begin|>", "tool▁call", "<|channel|>", "<minimax:")


def choose_tool_parser(asked: str, *, model_type: str, template: str | None) -> Decision[str]:
    """The parser of tool calls: the one asked for, or what the chat template shows.

    Args:
        asked: a name of the registry, "auto" or "none".
        model_type: as config.json names it.
        template: Jinja text of the chat template (all of them, if there are several).

    Raises:
        UnsupportedError: no parser of that name.
    """
    return _choose("tool_call_parser", asked, TOOL_PARSERS, _TOOL_SIGNS, model_type, template)


def choose_reasoning_parser(asked: str, *, model_type: str, template: str | None) -> Decision[str]:
    """The parser of reasoning, likewise."""
    return _choose(
        "reasoning_parser", asked, REASONING_PARSERS, _REASONING_SIGNS, model_type, template
    )


def _choose(
    name: str,
    asked: str,
    registry: Registry[Any],
    signs: tuple[tuple[tuple[str, ...], str], ...],
    model_type: str,
    template: str | None,
) -> Decision[str]:
    if asked != "auto":
        if asked != NONE:
            registry.entries(asked)
        return Decision(name=name, value=asked, reason="asked for", asked=True)
    if not template:
        reason = f"the checkpoint ({model_type}) has no chat template to tell"
        return Decision(name=name, value=NONE, reason=reason)
    other = next((sign for sign in _OTHER_SIGNS if sign in template), None)
    if other is not None and signs is _TOOL_SIGNS:
        reason = f"the chat template ({model_type}) writes {other}, which no parser here reads"
        return Decision(name=name, value=NONE, reason=reason)
    for words, value in signs:
        if all(word in template for word in words):
            reason = f"the chat template ({model_type}) writes {' and '.join(words)}"
            return Decision(name=name, value=value, reason=reason)
    reason = f"the chat template ({model_type}) shows no format that a parser here reads"
    return Decision(name=name, value=NONE, reason=reason)
