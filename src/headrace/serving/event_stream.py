"""Server-sent events: complete events only, comments in silence, an end as soon as nobody reads.

Each event is one `send`, so a comment never lands inside an event. The client's going away is
heard from the socket and closes the source at once, not at its next event. What is sent waits for
this client's socket only: a slow reader holds nobody up.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies of the nginx kind must pass events on as they come
}

# Line ends to Python's `splitlines`, by which many clients read; JSON leaves them as they are.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")


def event(payload: bytes) -> bytes:
    """One event of a JSON text, which becomes one line by any reading."""
    for raw, escaped in _LINE_ENDS:
        if raw in payload:  # inside a text, the only place where JSON has other than ASCII
            payload = payload.replace(raw, escaped)
    return b"data: " + payload + b"\n\n"


def event_of(body: Any) -> bytes:
    """One event of `body` as msgspec encodes it."""
    return event(_encode(body))


def named_event(name: str, body: Any) -> bytes:
    """The same with a name, by which some clients tell events apart."""
    return f"event: {name}\n".encode() + event_of(body)


class EventStream(Response):
    """Sends `events` as they come.

    Args:
        events: whole events; closed when the client goes away. It must end by itself and raise
            nothing: errors are events.
        ping_seconds: silence after which a comment is sent, for proxies that count.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping_seconds: float) -> None:
        self._events, self._ping_seconds = events, ping_seconds
        self._sent_at = 0.0
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        writer = asyncio.create_task(self._write(send))
        others = [
            asyncio.create_task(_until_disconnect(receive)),
            asyncio.create_task(self._ping(send)),
        ]
        try:
            await asyncio.wait([writer, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, *others):
                task.cancel()
            results = await asyncio.gather(writer, *others, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for each in events:
                await self._send(send, each)
        await self._send(send, b"", more=False)

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            silent = clock() - self._sent_at
            if silent >= self._ping_seconds:
                await self._send(send, PING)
            else:
                await asyncio.sleep(self._ping_seconds - silent)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sent_at = asyncio.get_running_loop().time()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Any, receive: Receive) -> Any:
    """The result of the coroutine `work`, which is cancelled when the client goes away.

    Returns:
        Its result; `None` when there is nobody left to have it.
    """
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
