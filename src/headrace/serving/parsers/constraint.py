"""What holds a model to its tools, as a structural tag: plain data for the grammar engine.

- none: anything (`None`).
- auto: anything (`None`). With `strict` tools or without parallel calls: free text, in which every
  call has its form and its schema; the answer ends after the first if there may be one only.
- required: calls only, at least one; one if there may be one only.
- a function: one call of it.

With a form of the content (`response_format` and the like) and tools that may be called: calls
only, or content of that form. Where a call is required there is no content, so its form does not
matter.

Reasoning stays free: it may come first, before all of this. The forms are xgrammar's
(structural tags: `tag`, `triggered_tags`, `tags_with_separator`).
"""

from typing import Any

from headrace.base.errors import UnsupportedError
from headrace.serving.parsers.reasoning import ReasoningParser
from headrace.serving.parsers.tool_parser import CallForm, ToolParser
from headrace.serving.parsers.tool_request import Tool, ToolRequest


def tool_constraint(
    parser: ToolParser,
    request: ToolRequest,
    *,
    content: dict[str, Any] | None = None,
    reasoning: ReasoningParser | None = None,
    prompt: str = "",
) -> dict[str, Any] | None:
    """The structural tag that a request with tools needs, or `None`.

    Args:
        content: the form that content must have, as a part of a structural tag.
        reasoning: how the model marks its reasoning, if it has any.
        prompt: what the answer goes on from; it tells whether reasoning is open already.

    Raises:
        UnsupportedError: a call is required, or content of a form, and the family's calls cannot be
            said in a grammar.
    """
    form, tools = parser.form, request.callable_tools
    required = request.choice == "required"
    if required or content is not None:
        if form is None:
            raise UnsupportedError(
                "tool_choice asks for a call" if required else "response_format goes with tools",
                why="the way this model writes calls cannot be held by a grammar",
                remedy="Use tool_choice auto" if required else "Send one of them",
            )
        calls = _only_calls(form, request)
        if content is not None and not required:
            calls = {"type": "or", "elements": [calls, content]}
        return _whole(_after_reasoning(calls, reasoning, prompt))
    needs_form = any(tool.strict for tool in tools) or not request.parallel
    if form is None or not form.trigger or not tools or not needs_form:
        return None
    calls = {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": [_tag(form, tool) for tool in tools],
        "at_least_one": False,
        "stop_after_first": not request.parallel,
    }
    return _whole(_after_reasoning(calls, reasoning, prompt))


def content_constraint(
    content: dict[str, Any], reasoning: ReasoningParser | None, prompt: str
) -> dict[str, Any] | None:
    """The structural tag for content of a form behind reasoning; `None` where none can come."""
    whole = _after_reasoning(content, reasoning, prompt)
    return None if whole is content else _whole(whole)


def _only_calls(form: CallForm, request: ToolRequest) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_tag(form, tool) for tool in request.callable_tools],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": request.only is not None or not request.parallel,
    }


def _whole(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def _tag(form: CallForm, tool: Tool) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": form.begin.replace("NAME", tool.name),
        "content": {
            "type": "json_schema",
            "json_schema": dict(tool.parameters),
            "style": form.style,
        },
        "end": form.end,
    }


def _after_reasoning(
    answer: dict[str, Any], reasoning: ReasoningParser | None, prompt: str
) -> dict[str, Any]:
    """The answer with reasoning before it: the rest of what is open, or as the model likes."""
    if reasoning is None:
        return answer
    awaited = reasoning.end_awaited(prompt)
    begin, end = ("", awaited) if awaited else reasoning.pairs[0]
    thought: dict[str, Any] = {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end},
            {"type": "regex", "pattern": "\\n{0,2}"},
        ],
    }
    if not awaited and _is_closed(reasoning, prompt):
        return answer
    if not awaited:
        thought = {"type": "optional", "content": thought}
    return {"type": "sequence", "elements": [thought, answer]}


def _is_closed(reasoning: ReasoningParser, prompt: str) -> bool:
    """The prompt ends with a block of reasoning, so that the model does none."""
    return prompt.rstrip().endswith(tuple(end for _, end in reasoning.pairs))
