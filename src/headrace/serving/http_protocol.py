"""uvicorn's HTTP with bounds on what comes before a request is one, our shape of errors, and no
chunks for clients of HTTP/1.0.

The parser itself takes heads of any length and waits for their end for ever: each connection could
hold any amount of memory, and a descriptor for good.
"""

import asyncio
import re
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.serving.errors import ApiError

MOST_HEAD_BYTES = 1 << 16  # of request line and headers; one read of the socket more is seen
HEAD_SECONDS = 30
_UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app: Any = WithoutChunks(self.app)
        self._head_bytes = 0
        self._is_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None  # `cycle` is what was read last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._is_head:
            self._head_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        if self._is_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._forget_deadline()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MOST_HEAD_BYTES:
            self._refuse(_too_large())
            raise ValueError("the head is too large")  # ends the parser's work on it
        self._is_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "This cannot be read as HTTP", code="invalid_http"))

    def _await_head(self) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _give_up(self) -> None:
        self._refuse(ApiError(408, f"No request within {HEAD_SECONDS} s", code="too_slow"))

    def _refuse(self, error: ApiError) -> None:
        """Answer and hang up, once; in the middle of another answer only the latter."""
        self._forget_deadline()
        if self.transport.is_closing():
            return
        before = self._answering
        if before is not None and before.response_started and not before.response_complete:
            self.transport.close()
            return
        body = error.encoded()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class WithoutChunks:
    """Answers a client of HTTP/1.0, which knows no chunks, by a body that ends as the connection
    does, where its length is not known before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("http_version") != "1.0":
            await self._app(scope, receive, send)
            return
        cycle: Any = send.__self__  # type: ignore[attr-defined]  # uvicorn's, of this answer
        is_sized = True

        async def send_plain(message: Message) -> None:
            nonlocal is_sized
            if message["type"] == "http.response.start":
                is_sized = any(name == b"content-length" for name, _ in message["headers"])
                if not is_sized:
                    cycle.chunked_encoding = False
            elif not is_sized:
                while cycle.flow.write_paused and not cycle.disconnected:
                    await cycle.flow.drain()
                # Nobody else sends between this line and the next, which no longer waits.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)


def _without_upgrade(data: bytes) -> bytes:
    """A head whose `Upgrade` has another name: nothing here is upgraded to, which HTTP allows, but
    the parser would read no body. Java's client asks for HTTP/2 that way."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    return _UPGRADE.sub(b"\nx-asked:", head) + data[len(head) :]


def _too_large() -> ApiError:
    most = f"{MOST_HEAD_BYTES:,} bytes"
    return ApiError(431, f"The headers have more than {most}", code="head_too_large")
