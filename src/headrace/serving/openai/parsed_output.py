"""The text of a choice through the parsers of tool calls and reasoning."""

from collections.abc import Iterable, Sequence

from headrace.serving.openai.message_pieces import MessagePiece, ToolCallPiece
from headrace.serving.openai.reasoning_count import ReasoningCount
from headrace.serving.parsers import (
    CallArguments,
    CallStarted,
    ContentText,
    Event,
    Interpreter,
    ReasoningText,
)


class ParsedOutput:
    """An `OutputInterpreter`.

    Args:
        shows_reasoning: off: it is left out.
        reasoning_at_once: it is held back until it is complete.
        count: of reasoning tokens, where that can be told.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        *,
        shows_reasoning: bool,
        reasoning_at_once: bool,
        count: ReasoningCount | None,
    ) -> None:
        self._interpreter = interpreter
        self._shows_reasoning, self._at_once = shows_reasoning, reasoning_at_once
        self._count = count
        self._held = ""
        self._has_reasoning = self._has_more = False

    def read(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> MessagePiece:
        events = self._interpreter.feed(text) if text else []
        if is_last:
            events += self._interpreter.finish()
        piece = _piece(events)
        self._has_reasoning |= bool(piece.reasoning)
        self._has_more |= bool(piece.content or piece.tool_calls)
        if self._count is not None:
            self._count.push(token_ids)
        if not self._shows_reasoning:
            piece.reasoning = ""
        elif self._at_once:
            self._held += piece.reasoning
            goes_on = not (piece.content or piece.tool_calls or is_last)
            piece.reasoning = "" if goes_on else self._held
            self._held = self._held if goes_on else ""
        return piece

    def finish_reason(self, reason: str) -> str:
        return self._interpreter.finish_reason(reason)

    @property
    def reasoning_tokens(self) -> int | None:
        if self._count is None:
            return None
        return self._count.value(has_reasoning=self._has_reasoning, has_more=self._has_more)


def _piece(events: Iterable[Event]) -> MessagePiece:
    content, reasoning = [], []
    calls: list[ToolCallPiece] = []
    for event in events:
        match event:
            case ContentText(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallStarted(index, call_id, name):
                calls.append(ToolCallPiece(index=index, id=call_id, name=name))
            case CallArguments(index, text):
                calls.append(ToolCallPiece(index=index, arguments=text))
    return MessagePiece(content="".join(content), reasoning="".join(reasoning), tool_calls=calls)
