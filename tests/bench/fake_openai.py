"""A server that speaks OpenAI's streams with delays that the test gives, in a thread of its own."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """What the server does with a request.

    Attributes:
        first: seconds to the first token. gap: seconds between chunks.
        tokens_per_chunk: how many a chunk brings.
        status, body: a refusal instead of a stream.
        usage: whether a usage chunk comes where it is asked for.
        cut_after: chunks after which the connection is cut.
        error_after: chunks after which an error event comes.
        abort_after: chunks after which the finish_reason is abort.
        short_by: tokens fewer than asked.
    """

    first: float = 0.0
    gap: float = 0.0
    tokens_per_chunk: int = 1
    status: int = 200
    body: str = ""
    usage: bool = True
    cut_after: int | None = None
    error_after: int | None = None
    abort_after: int | None = None
    short_by: int = 0
    cached: int | None = None
    reasoning: int = 0


@dataclass(slots=True)
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float
    running: int


@dataclass
class FakeOpenAI:
    """Answers each request as `behave` says of its number among the generations.

    Attributes:
        seen: every POST. peak: most generations at once.
        get: what GET routes answer. port_wanted: 0 for any.
    """

    behave: Callable[[int], Behaviour] = lambda number: Behaviour()
    seen: list[Seen] = field(default_factory=list)
    get: dict[str, Any] = field(
        default_factory=lambda: {"/v1/models": {"data": [{"id": "fake"}, {"id": "other"}]}}
    )
    peak: int = 0
    running: int = 0
    port_wanted: int = 0

    def __enter__(self) -> "FakeOpenAI":
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,))
        self._thread.start()
        ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def generations(self) -> list[Seen]:
        return [each for each in self.seen if each.path.endswith("completions")]

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._stop = asyncio.Event()
            server = await asyncio.start_server(
                self._connection, "127.0.0.1", self.port_wanted, backlog=2048
            )
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._stop.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        self._loop.run_until_complete(serve())
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            found = self.get.get(path)
            _whole(writer, 200 if found is not None else 404, json.dumps(found))
            return True
        body = json.loads(data or b"{}")
        seen = Seen(path, headers, body, time.perf_counter(), self.running)
        self.seen.append(seen)
        if not path.endswith("completions"):
            _whole(writer, 200 if path in self.get else 404, "{}")
            return True
        behaviour = self.behave(len(self.generations) - 1)
        if behaviour.status != 200:
            _whole(writer, behaviour.status, behaviour.body)
            return True
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._stream(writer, path.endswith("chat/completions"), body, behaviour)
        finally:
            self.running -= 1

    async def _stream(
        self,
        writer: asyncio.StreamWriter,
        is_chat: bool,
        body: dict[str, Any],
        behaviour: Behaviour,
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        if is_chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        _send(writer, b": ping\n\n")
        await asyncio.sleep(behaviour.first)
        made, asked = 0, body["max_tokens"] - behaviour.short_by
        chunks = 0
        while made < asked:
            if chunks:
                await asyncio.sleep(behaviour.gap)
            if chunks == behaviour.cut_after:
                writer.transport.abort()
                return False
            if chunks == behaviour.error_after:
                _event(writer, {"error": {"message": "a step failed", "code": 500}})
                break
            if chunks == behaviour.abort_after:
                _event(writer, {"choices": [{"delta": {}, "text": "", "finish_reason": "abort"}]})
                break
            made = min(made + behaviour.tokens_per_chunk, asked)
            text = "é" if made < asked else "."
            reason = "length" if made == asked else None
            name = "content" if chunks >= behaviour.reasoning else "reasoning_content"
            choice = {"delta": {name: text}} if is_chat else {"text": text}
            _event(writer, {"choices": [{**choice, "index": 0, "finish_reason": reason}]})
            await writer.drain()
            chunks += 1
        if behaviour.usage and (body.get("stream_options") or {}).get("include_usage"):
            prompt = body.get("prompt") or body["messages"][-1]["content"]
            count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            usage: dict[str, Any] = {"prompt_tokens": count, "completion_tokens": made}
            if behaviour.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": behaviour.cached}
            _event(writer, {"choices": [], "usage": usage})
        _send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _whole(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    data = body.encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def _event(writer: asyncio.StreamWriter, payload: dict[str, Any]) -> None:
    _send(writer, b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n")


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
