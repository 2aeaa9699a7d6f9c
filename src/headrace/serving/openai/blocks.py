"""A message as blocks that follow each other, as /v1/messages and /v1/responses show it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.request.messages import Delta
from headrace.serving.openai.message_pieces import OutputInterpreter, ToolCallPiece


@dataclass(slots=True, kw_only=True)
class Block:
    """Reasoning, text, or a call of a tool.

    Attributes:
        text: what there is of it so far; of a call its arguments, JSON as text.
        call_id, name: of a call.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""


Step = tuple[Literal["open", "add", "close"], Block, str]  # the last is what was added


class Blocks:
    """Puts what an interpreter reads of one choice into blocks, of which one at a time is open.

    White space between blocks belongs to none.
    """

    def __init__(self, interpreter: OutputInterpreter) -> None:
        self._interpreter = interpreter
        self.all: list[Block] = []
        self._is_open = False
        self._space = ""
        self._calls: dict[int, Block] = {}

    def read(self, delta: Delta) -> Iterator[Step]:
        """What a delta changes; with the last one the last block ends."""
        is_last = delta.finished is not None
        piece = self._interpreter.read(delta.text, delta.token_ids, is_last=is_last)
        if piece.reasoning:
            yield from self._write("reasoning", piece.reasoning)
        if piece.content:
            yield from self._write("text", piece.content)
        for call in piece.tool_calls:
            yield from self._call(call)
        if is_last:
            yield from self._close()

    def _write(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if not self._is_open or self.all[-1].kind != kind:
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return
            yield from self._open(Block(kind=kind, index=len(self.all)))
        self.all[-1].text += text
        yield "add", self.all[-1], text

    def _call(self, piece: ToolCallPiece) -> Iterator[Step]:
        block = self._calls.get(piece.index)
        if block is None:
            block = Block(kind="call", index=len(self.all))
            block.call_id, block.name = piece.id or "", piece.name or ""
            self._calls[piece.index] = block
            self._space = ""
            yield from self._open(block)
        if piece.arguments:
            block.text += piece.arguments
            yield "add", block, piece.arguments

    def _open(self, block: Block) -> Iterator[Step]:
        yield from self._close()
        self.all.append(block)
        self._is_open = True
        yield "open", block, ""

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield "close", self.all[-1], ""
