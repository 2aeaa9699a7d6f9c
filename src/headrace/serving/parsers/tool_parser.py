"""How a family of models writes tool calls, and the registry of families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.registry import Registry
from headrace.serving.parsers.call_writer import CallWriter, openai_id
from headrace.serving.parsers.scanner import Scanner, Steps

# Name of a tool -> JSON schema of its parameters.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How one call is written, for a grammar that holds the model to it.

    Attributes:
        begin, end: text around the arguments; `NAME` in them stands for the tool's name.
        separator: between two calls.
        trigger: the beginning of `begin` that no other text has; empty if there is none, and free
            text with calls in it then cannot be held to their form.
        style: how the arguments are written ("json", or a style of xgrammar's json_schema format).
    """

    begin: str
    end: str
    separator: str = ""
    trigger: str = ""
    style: str = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParser:
    """One family.

    Attributes:
        read: reads calls from a marker (or a start) on. It tells `CallWriter` what it finds and
            returns after the last one; `Unreadable` gives back as text what is not in a call.
        markers: strings that begin calls, anywhere in the content.
        starts: characters that may begin a call where the content begins.
        special_markers: markers, of all kinds, that published checkpoints of the family hold as
            special tokens, which are normally left out of the text.
        ends_reasoning: markers that begin a call inside of reasoning that was not closed.
        trims: the template puts white space around calls, which is not content.
        form: how calls are written; `None` if no grammar can say it.
        make_id: makes the id of a call.
    """

    read: Callable[[Scanner, CallWriter, Tools], Steps[None]]
    markers: tuple[str, ...] = ()
    starts: str = ""
    special_markers: tuple[str, ...] = ()
    ends_reasoning: tuple[str, ...] = ()
    trims: bool = False
    form: CallForm | None = None
    make_id: Callable[[], str] = openai_id


TOOL_PARSERS: Registry[ToolParser] = Registry("tool call parser", "headrace.tool_parsers")


def register_tool_parser(*names: str) -> Callable[[ToolParser], ToolParser]:
    """Make a family known under these names; third parties by the entry-point group
    `headrace.tool_parsers`."""
    return TOOL_PARSERS.register(*names)
