"""What holds a model to its tools, as a structural tag: plain data for the grammar engine.

- none: anything (`None`).
- auto: anything (`None`). With `strict` tools or without parallel calls: free text, in which every
  call has its form and its schema; the answer ends after the first if there may be one only.
- required: calls only, at least one; one if there may be one only.
- a function: one call of it.

Reasoning stays free: it may come first, before all of this. The form is xgrammar's
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
    reasoning: ReasoningParser | None = None,
    prompt: str = "",
) -> dict[str, Any] | None:
    """The structural tag that a request needs, or `None`.

    Args:
        reasoning: how the model marks its reasoning, if it has any.
        prompt: what the answer goes on from; it tells whether reasoning is open already.

    Raises:
        UnsupportedError: a call is required, and the family's calls cannot be said in a grammar.
    """
    form, tools = parser.form, request.callable_tools
    if request.choice == "required":
        if form is None:
            raise UnsupportedError(
                "tool_choice asks for a call",
                why="the way this model writes calls cannot be held by a grammar",
                remedy="Use tool_choice auto",
            )
        calls = {
            "type": "tags_with_separator",
            "tags": [_tag(form, tool) for tool in tools],
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": request.only is not None or not request.parallel,
        }
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
    calls: dict[str, Any], reasoning: ReasoningParser | None, prompt: str
) -> dict[str, Any]:
    """The calls with reasoning before them: the rest of what is open, or as the model likes.

    Markers that are special tokens cannot be written under a grammar, so such a model goes to its
    calls at once.
    """
    if reasoning is None or reasoning.special:
        return calls
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
        return calls
    if not awaited:
        thought = {"type": "optional", "content": thought}
    return {"type": "sequence", "elements": [thought, calls]}


def _is_closed(reasoning: ReasoningParser, prompt: str) -> bool:
    """The prompt ends with a block of reasoning, so that the model does none."""
    return prompt.rstrip().endswith(tuple(end for _, end in reasoning.pairs))
