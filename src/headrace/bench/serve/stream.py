"""Reading a stream of an OpenAI-compatible server, cheaply: only the fields that are measured."""

from typing import Any

import msgspec

DONE = b"[DONE]"


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class Choice(msgspec.Struct):
    """Of a completion (text) or a chat (delta)."""

    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether tokens were made since the chunk before.

        A chat begins with a chunk that only names the role. In a completion an empty text means a
        token that shows nothing by itself (half a character, a model without tokenizer), unless
        the chunk is there to end the stream.
        """
        if self.delta is not None:
            return bool(self.delta)
        return bool(self.text) or self.finish_reason is None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


read_chunk = msgspec.json.Decoder(Chunk).decode


class EventLines:
    """Cuts what the network brings into the payloads of events; comments are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def error_text(error: object, most: int = 200) -> str:
    """What an error says, whatever its form, in one line of at most so many characters."""
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or str(error)
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def error_of_body(body: bytes) -> str:
    """What the body of a refusal says."""
    try:
        return error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return error_text(body.decode("utf-8", "replace")) or "no message"
