"""What the text of one choice means for its message: content, reasoning, tool calls.

A chat request gets one interpreter per choice from its plan. The stream and the whole reply are
both made from what it returns, so they cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET

from headrace.serving.openai.replies import ChatDelta, ChatMessage, FunctionCall, ToolCall


@dataclass(slots=True, kw_only=True)
class ToolCallPiece:
    """A piece of the tool call with this index; `id` and `name` come with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class MessagePiece:
    """What some output adds to the message. May add nothing, while a marker is incomplete."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallPiece] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputInterpreter(Protocol):
    """Reads the output of one choice, in order; belongs to that choice alone."""

    def read(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> MessagePiece:
        """What new text adds. With the last text everything held back comes out."""
        ...

    def finish_reason(self, reason: str) -> str:
        """How the message ended, after the last `read`: `tool_calls` in place of `stop`, say."""
        ...

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; `None` where that is not known, or nobody looks for any."""
        ...


class PlainText:
    """The text is the content."""

    def read(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> MessagePiece:
        return MessagePiece(content=text)

    def finish_reason(self, reason: str) -> str:
        return reason

    @property
    def reasoning_tokens(self) -> int | None:
        return None


@dataclass(slots=True)
class MessageBuilder:
    """Pieces of a message, joined."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCallPiece] = field(default_factory=dict)

    def add(self, piece: MessagePiece) -> None:
        self.content.append(piece.content)
        self.reasoning.append(piece.reasoning)
        for each in piece.tool_calls:
            call = self.calls.setdefault(each.index, ToolCallPiece(index=each.index))
            call.id, call.name = call.id or each.id, call.name or each.name
            call.arguments += each.arguments

    def message(self) -> ChatMessage:
        """The whole message; content is null where there are only tool calls."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        return ChatMessage(
            content=content if content or not self.calls else None,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=[
                ToolCall(
                    id=call.id or "",
                    type="function",
                    function=FunctionCall(name=call.name or "", arguments=call.arguments),
                )
                for _, call in sorted(self.calls.items())
            ]
            or UNSET,
        )


def deltas_of(piece: MessagePiece) -> list[ChatDelta]:
    """The piece as chunks of a stream show it, at least one.

    Clients join calls by index, and some look at the first entry of a chunk only: so no chunk has
    more than one piece of a call, and the first of a call has its id, its name and no arguments.
    """
    texts = ChatDelta(
        content=piece.content or UNSET,
        reasoning_content=piece.reasoning or UNSET,
        reasoning=piece.reasoning or UNSET,
    )
    calls = [ChatDelta(tool_calls=[_streamed(call)]) for call in piece.tool_calls]
    return [texts, *calls] if piece.content or piece.reasoning or not calls else calls


def _streamed(call: ToolCallPiece) -> ToolCall:
    is_first = call.id is not None
    return ToolCall(
        index=call.index,
        id=call.id if call.id is not None else UNSET,
        type="function" if is_first else UNSET,
        function=FunctionCall(
            name=call.name if call.name is not None else UNSET, arguments=call.arguments
        ),
    )
