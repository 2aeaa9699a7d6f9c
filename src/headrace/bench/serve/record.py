"""What was seen of one request."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from headrace.bench.serve.stream import DONE, error_text, read_chunk

State = Literal["waiting", "running", "done", "failed"]


@dataclass(slots=True, kw_only=True)
class Record:
    """One request, as its stream comes. Times are seconds of one clock.

    Attributes:
        input_len: tokens of its prompt, if known. output_len: most tokens that it asked for.
        sent: when it was sent; first: when its first token came; ended: its last chunk.
        gaps: seconds between the chunks that brought tokens; a chunk may bring several.
        chunks: how many brought tokens.
        input_tokens, output_tokens, cached_tokens: the server's count, where it gave one.
    """

    input_len: int | None
    output_len: int
    state: State = "waiting"
    sent: float = 0.0
    first: float | None = None
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    chunks: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    _last: float = 0.0
    _has_finished: bool = False

    def begin(self, now: float) -> None:
        self.state, self.sent = "running", now

    def fail(self, error: str, now: float) -> None:
        if self.state != "failed":  # the first error is the cause of the others
            self.state, self.error, self.ended = "failed", error, now

    def take(self, payload: bytes, now: float) -> None:
        """One event of the stream."""
        if payload == DONE:
            return
        try:
            chunk = read_chunk(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail(f"an event cannot be read: {error}", now)
            return
        if chunk.error is not None:
            self.fail(f"in the stream: {error_text(chunk.error)}", now)
            return
        if chunk.usage is not None:
            self.input_tokens = chunk.usage.prompt_tokens
            self.output_tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            if choice.has_tokens:
                self._count(now)
            if choice.finish_reason is not None:
                self._finish(choice.finish_reason, now)

    def _count(self, now: float) -> None:
        self.chunks += 1
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self._last)
        self._last = self.ended = now

    def _finish(self, reason: str, now: float) -> None:
        self._has_finished, self.ended = True, now
        if reason in ("error", "abort"):
            self.fail(f"finish_reason is {reason}", now)

    def close(self, now: float) -> None:
        """The server closed the stream."""
        if self.state == "failed":
            return
        if not self._has_finished:
            self.fail(f"the stream ended without a finish_reason, after {self.chunks} chunks", now)
            return
        if self.first is None:
            self.first = self.ended
        self.state = "done"

    # Of a request that is done:

    @property
    def made(self) -> int:
        """Output tokens: as the server counted, else the chunks that brought some."""
        return self.chunks if self.output_tokens is None else self.output_tokens

    @property
    def read(self) -> int | None:
        """Input tokens: as the server counted, else what is known of the prompt."""
        return self.input_len if self.input_tokens is None else self.input_tokens

    @property
    def ttft(self) -> float:
        assert self.first is not None
        return self.first - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; `None` where there is one at most."""
        return (self.e2e - self.ttft) / (self.made - 1) if self.made > 1 else None
