"""Replies of /v1/messages, whole and streamed, from the deltas of a generation."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import msgspec

from headrace.request.messages import Delta
from headrace.serving.errors import ApiError
from headrace.serving.event_stream import named_event
from headrace.serving.generation import Generation
from headrace.serving.openai.blocks import Block, Blocks, Step
from headrace.serving.openai.chat_plan import ChatPlan

# Of chats -> of messages. What an operator ended is not whole; no reason of theirs says more.
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ABORTED = "pause_turn"
_OUT_OF_CONTEXT = "model_context_window_exceeded"
_ERRORS = {503: "overloaded_error", 400: "invalid_request_error"}


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those that the prefix cache did not hold."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageAnswer(msgspec.Struct):
    """The reply of /v1/messages."""

    id: str
    model: str
    content: list[dict[str, Any]]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageReply:
    """Makes the reply to one request; the stream sends as it comes what the other form joins.

    Args:
        most: tokens that the request allows; more than the plan's where the context ends first.
    """

    def __init__(self, plan: ChatPlan, generation: Generation, model: str, most: int) -> None:
        self._generation, self._model = generation, model
        self._is_cut = (plan.submit.params.max_tokens or most) < most
        self._interpreter = plan.interpreter()
        self._blocks = Blocks(self._interpreter)
        self._reason: str | None = None
        self._stop: str | None = None

    async def whole(self) -> MessageAnswer:
        """Wait for the whole message."""
        async for _, delta in self._generation.deltas():
            for _step in self._steps(delta):
                pass
        return self._message([_whole_block(block) for block in self._blocks.all])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The message without content, its blocks, its end."""
        yield _event("message_start", message=self._message([]))
        async for _, delta in self._generation.deltas():
            for kind, block, added in self._steps(delta):
                yield _block_event(kind, block, added)
        ending = {"stop_reason": self._reason, "stop_sequence": self._stop}
        yield _event("message_delta", delta=ending, usage=self._usage())
        yield _event("message_stop")

    def _steps(self, delta: Delta) -> Iterator[Step]:
        yield from self._blocks.read(delta)
        ending = delta.finished
        if ending is None:
            return
        reason = self._interpreter.finish_reason(ending.reason)
        self._reason = _REASONS.get(reason, _ABORTED)
        if reason == "length" and self._is_cut:
            self._reason = _OUT_OF_CONTEXT
        if reason == "stop" and isinstance(ending.stop_reason, str):
            self._reason, self._stop = "stop_sequence", ending.stop_reason

    def _message(self, content: list[dict[str, Any]]) -> MessageAnswer:
        return MessageAnswer(
            id=self._generation.record.id,
            model=self._model,
            content=content,
            usage=self._usage(),
            stop_reason=self._reason,
            stop_sequence=self._stop,
        )

    def _usage(self) -> MessageUsage:
        cached = self._generation.cached_tokens
        return MessageUsage(
            input_tokens=self._generation.prompt_tokens - cached,
            output_tokens=self._generation.record.output_tokens,
            cache_read_input_tokens=cached,
        )


def failure_event(error: ApiError) -> bytes:
    """The end of a stream that fails."""
    kind = _ERRORS.get(error.status, "api_error")
    return _event("error", error={"type": kind, "message": error.body.error.message})


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


def _block_event(kind: str, block: Block, added: str) -> bytes:
    place = block.index
    if kind == "open":
        return _event("content_block_start", index=place, content_block=_empty_block(block))
    if kind == "close":
        return _event("content_block_stop", index=place)
    delta = {
        "reasoning": {"type": "thinking_delta", "thinking": added},
        "text": {"type": "text_delta", "text": added},
        "call": {"type": "input_json_delta", "partial_json": added},
    }[block.kind]
    return _event("content_block_delta", index=place, delta=delta)


def _empty_block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole_block(block: Block) -> dict[str, Any]:
    made = _empty_block(block)
    if block.kind == "call":
        made["input"] = _arguments(block.text)
    else:
        made["thinking" if block.kind == "reasoning" else "text"] = block.text
    return made


def _arguments(text: str) -> Any:
    """What a call was given; one that was cut off, shown only where an operator asks for that, has
    none."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}
