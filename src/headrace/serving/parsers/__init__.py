"""Reads the text of an answer: reasoning, content and tool calls. See README.md."""

from headrace.serving.parsers import (  # noqa: F401 - each registers its family
    hermes,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from headrace.serving.parsers.call_writer import CallWriter
from headrace.serving.parsers.choice import choose_reasoning_parser, choose_tool_parser
from headrace.serving.parsers.constraint import tool_constraint
from headrace.serving.parsers.events import (
    Call,
    CallArguments,
    CallEnded,
    CallStarted,
    Collected,
    ContentText,
    Event,
    ReasoningText,
    collect,
)
from headrace.serving.parsers.interpreter import Interpreter
from headrace.serving.parsers.reading import Reading
from headrace.serving.parsers.reasoning import (
    REASONING_PARSERS,
    ReasoningParser,
    register_reasoning_parser,
)
from headrace.serving.parsers.scanner import Scanner, Steps, Unreadable
from headrace.serving.parsers.tool_parser import (
    TOOL_PARSERS,
    CallForm,
    ToolParser,
    Tools,
    register_tool_parser,
)
from headrace.serving.parsers.tool_request import Tool, ToolRequest

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Call",
    "CallArguments",
    "CallEnded",
    "CallForm",
    "CallStarted",
    "CallWriter",
    "Collected",
    "ContentText",
    "Event",
    "Interpreter",
    "Reading",
    "ReasoningParser",
    "ReasoningText",
    "Scanner",
    "Steps",
    "Tool",
    "ToolParser",
    "ToolRequest",
    "Tools",
    "Unreadable",
    "choose_reasoning_parser",
    "choose_tool_parser",
    "collect",
    "register_reasoning_parser",
    "register_tool_parser",
    "tool_constraint",
]
