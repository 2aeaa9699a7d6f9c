"""Size and type of a body, and how long it may take to come. Nothing is read ahead of the route."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.serving.errors import ApiError

DROP_SECONDS = 5
BODY_SECONDS = 60  # of silence
BODY_METHODS = ("POST", "PUT", "PATCH")


class BodyLimits:
    """413 for bodies above `most_bytes`, announced or not; 415 for what is not JSON; 408 for those
    that stop on the way."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in BODY_METHODS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        refusal = None
        if announced.isdecimal() and int(announced[:20]) > self._most_bytes:
            refusal = self._too_large()
        elif announced != "0" and (announced or "transfer-encoding" in headers):
            refusal = _not_json(headers.get("content-type", "")) or _encoded(headers)
        if refusal is not None:
            if "expect" not in headers:
                await _drop_rest(receive)
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        read, is_complete = 0, False

        async def counted() -> Message:
            nonlocal read, is_complete
            try:
                async with asyncio.timeout(None if is_complete else BODY_SECONDS):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"Nothing of the body came for {BODY_SECONDS} s",
                    code="too_slow",
                    headers={"connection": "close"},
                ) from None
            is_complete = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self._most_bytes:
                if message.get("more_body", False):
                    await _drop_rest(receive)
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than {self._most_bytes:,} bytes (option max_body_bytes)",
            code="body_too_large",
            headers={"connection": "close"},
        )


async def _drop_rest(receive: Receive) -> None:
    """Read what the client still sends, for a while: most read no answer before they have sent all,
    and find the connection broken when it is closed on them."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DROP_SECONDS):
            while (await receive()).get("more_body", False):
                pass


def _encoded(headers: Headers) -> ApiError | None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return None
    return ApiError(
        415,
        f"The body has the encoding {encoding[:80]!r}; send it as it is",
        code="unsupported_encoding",
        headers={"accept-encoding": "identity"},
    )


def _not_json(content_type: str) -> ApiError | None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    return ApiError(
        415,
        f"The content type is {kind[:80]!r}; send application/json",
        code="unsupported_media_type",
    )
