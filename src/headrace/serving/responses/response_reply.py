"""Replies of /v1/responses, whole and streamed, from the deltas of a generation."""

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from headrace.request.messages import Delta
from headrace.serving.errors import ApiError
from headrace.serving.event_stream import named_event
from headrace.serving.generation import Generation
from headrace.serving.openai.blocks import Block, Blocks, Step
from headrace.serving.openai.chat_plan import ChatPlan
from headrace.serving.parsers.json_text import is_object
from headrace.serving.responses.response_request import ResponseRequest

Fields = dict[str, Any]

# Of chats -> status and, of what is not whole, why.
_ENDINGS = {"stop": ("completed", None), "tool_calls": ("completed", None)}
_CUT = ("incomplete", {"reason": "max_output_tokens"})
_ABORTED = ("incomplete", {"reason": "aborted"})
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class ResponseReply:
    """Makes the reply to one request; every block of the answer is an item of its output."""

    def __init__(
        self, body: ResponseRequest, plan: ChatPlan, generation: Generation, model: str
    ) -> None:
        self._body, self._plan = body, plan
        self._generation, self._model = generation, model
        self._interpreter = plan.interpreter()
        self._blocks = Blocks(self._interpreter)
        self._created = int(time.time())
        self._events = 0
        self._status: str = "in_progress"
        self._why: Fields | None = None

    async def whole(self) -> Fields:
        """Wait for the whole answer."""
        async for _, delta in self._generation.deltas():
            for _step in self._steps(delta):
                pass
        return self._response()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response in progress, its items piece by piece, the response with its end."""
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())
        async for _, delta in self._generation.deltas():
            for step in self._steps(delta):
                block = step[1]
                status = self._block_status(block)
                for name, fields in _events_of(self._id(block), step, status):
                    yield self._event(name, **fields)
        yield self._event(f"response.{self._status}", response=self._response())

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        self._status = "failed"
        told = {"code": "server_error", "message": error.body.error.message}
        return self._event("response.failed", response={**self._response(), "error": told})

    def _steps(self, delta: Delta) -> Iterator[Step]:
        steps, ending = list(self._blocks.read(delta)), delta.finished
        if ending is not None:  # known before the last block is told of
            reason = self._interpreter.finish_reason(ending.reason)
            cut = _CUT if reason == "length" else _ABORTED
            self._status, self._why = _ENDINGS.get(reason, cut)
        yield from steps

    def _block_status(self, block: Block) -> str:
        """A response that is cut off ends in an item that is."""
        is_cut = self._status == "incomplete" and block is self._blocks.all[-1]
        is_whole = block.kind == "call" and is_object(block.text)
        return "incomplete" if is_cut and not is_whole else "completed"

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})

    def _id(self, block: Block) -> str:
        own = self._generation.record.id.removeprefix("resp_")
        return f"{_PREFIXES[block.kind]}_{own}_{block.index}"

    def _response(self) -> Fields:
        body, params = self._body, self._plan.submit.params
        is_over = self._status != "in_progress"
        items = [
            _item(self._id(block), block, self._block_status(block)) for block in self._blocks.all
        ]
        return {
            "id": self._generation.record.id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": self._why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": items if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,  # nothing is, whatever was asked
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": body.user,
        }

    def _usage(self) -> Fields:
        read, made = self._generation.prompt_tokens, self._generation.record.output_tokens
        cached = self._generation.cached_tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self._interpreter.reasoning_tokens or 0},
            "total_tokens": read + made,
        }


def _item(name: str, block: Block, status: str) -> Fields:
    """A block as an item; without its text while it is in progress."""
    text = "" if status == "in_progress" else block.text
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": text}
        return {"id": name, "type": "function_call", "status": status, **call}
    content = [] if status == "in_progress" else [_part(block, text)]
    if block.kind == "reasoning":
        return {"id": name, "type": "reasoning", "summary": [], "content": content}
    shared = {"role": "assistant", "status": status, "content": content}
    return {"id": name, "type": "message", **shared}


def _part(block: Block, text: str) -> Fields:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events_of(name: str, step: Step, status: str) -> Iterator[tuple[str, Fields]]:
    """Names and fields of the events that tell one step of a block.

    Args:
        status: of the block, should this be its end.
    """
    kind, block, added = step
    is_call = block.kind == "call"
    place: Fields = {"output_index": block.index}
    inside: Fields = {**place, "item_id": name} | ({} if is_call else {"content_index": 0})
    more: Fields = {"logprobs": []} if block.kind == "text" else {}
    if kind == "open":
        yield "response.output_item.added", {**place, "item": _item(name, block, "in_progress")}
        if not is_call:
            yield "response.content_part.added", {**inside, "part": _part(block, "")}
    elif kind == "add":
        yield f"{_DELTAS[block.kind]}.delta", {**inside, "delta": added, **more}
    else:
        whole = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
        yield f"{_DELTAS[block.kind]}.done", {**inside, **whole, **more}
        if not is_call:
            yield "response.content_part.done", {**inside, "part": _part(block, block.text)}
        yield "response.output_item.done", {**place, "item": _item(name, block, status)}
