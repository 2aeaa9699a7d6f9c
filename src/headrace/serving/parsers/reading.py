"""All that one chat request asks of the reading of its answers."""

from dataclasses import dataclass
from typing import Any

from headrace.base.errors import UnsupportedError
from headrace.serving.parsers.choice import NONE
from headrace.serving.parsers.constraint import content_constraint, tool_constraint
from headrace.serving.parsers.interpreter import Interpreter
from headrace.serving.parsers.reasoning import REASONING_PARSERS, ReasoningParser
from headrace.serving.parsers.tool_parser import TOOL_PARSERS, ToolParser
from headrace.serving.parsers.tool_request import ToolRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers to one request are read.

    Attributes:
        tool_parser: `None` if no calls are read.
        constraint: a structural tag that generation must be held to, or `None`.
        prompt: what the answers go on from.
        stream_arguments: calls are shown as they come rather than once they are complete.
    """

    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    request: ToolRequest | None
    constraint: dict[str, Any] | None
    prompt: str
    stream_arguments: bool

    @classmethod
    def of(
        cls,
        *,
        tool_parser: str,
        reasoning_parser: str,
        request: ToolRequest | None,
        prompt: str,
        content: dict[str, Any] | None = None,
        stream_arguments: bool = False,
    ) -> "Reading":
        """Settle it from names of parsers (or "none") and what the request says.

        Args:
            content: the form that content must have, as a part of a structural tag. `constraint`
                holds it then, unless nothing else can come.

        Raises:
            UnsupportedError: the request wants calls and none can be read, or it needs a grammar
                that this model's way of calling has not.
        """
        tools = reasoning = constraint = None
        if reasoning_parser != NONE:
            reasoning = REASONING_PARSERS.entries(reasoning_parser)[-1]
        if request is not None and request.callable_tools:
            if tool_parser == NONE:
                raise UnsupportedError(
                    "tools cannot be called",
                    why="this server has no parser for the way the model writes calls",
                    remedy="Start it with --tool-call-parser and one of "
                    f"{', '.join(sorted(TOOL_PARSERS))}, or send tool_choice none",
                )
            tools = TOOL_PARSERS.entries(tool_parser)[-1]
            constraint = tool_constraint(
                tools, request, content=content, reasoning=reasoning, prompt=prompt
            )
        elif content is not None:
            constraint = content_constraint(content, reasoning, prompt)
        return cls(
            tool_parser=tools,
            reasoning_parser=reasoning,
            request=request,
            constraint=constraint,
            prompt=prompt,
            stream_arguments=stream_arguments,
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be special tokens in some vocabulary, which then must come with the text, and be
        among those that the model may write under `constraint`."""
        words: list[str] = []
        if self.tool_parser is not None:
            words += [*self.tool_parser.markers, *self.tool_parser.special_markers]
        if self.reasoning_parser is not None:
            words += [word for pair in self.reasoning_parser.pairs for word in pair]
        return tuple(dict.fromkeys(words))

    def interpreter(self) -> Interpreter:
        """One for each answer."""
        request = self.request
        most = None
        if request is not None and (request.only is not None or not request.parallel):
            most = 1
        return Interpreter(
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            tools=None if request is None else request.schemas,
            prompt=self.prompt,
            live=self.stream_arguments,
            most_calls=most,
        )
