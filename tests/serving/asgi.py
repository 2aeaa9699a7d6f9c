"""One request to an ASGI app as a server makes it, with a hand on socket and time."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Exchange:
    """Posts `body` to `path`; `sent` fills with what the app sends.

    Attributes:
        gone: set it, and the client has gone away. slow: while it is clear, the client reads
            nothing and sending waits.
    """

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._app, self._path, self._body = app, path, json.dumps(body).encode()
        self.sent: list[dict[str, Any]] = []
        self.gone, self.slow = asyncio.Event(), asyncio.Event()
        self.slow.set()
        self._has_read = False

    @property
    def text(self) -> str:
        return b"".join(each.get("body", b"") for each in self.sent).decode()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [
                (b"host", b"test"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self._body)).encode()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self._app(scope, self._receive, self._send)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def _receive(self) -> dict[str, Any]:
        if not self._has_read:
            self._has_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.slow.wait()
        self.sent.append(message)
