"""What every answer says in its head: the request's id, and which fields had no effect."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.serving.ignored_fields import IGNORED_FIELDS, OF_REQUEST, header_of

REQUEST_ID = "x-request-id"
TOLD = (REQUEST_ID, IGNORED_FIELDS)
_LONGEST_ID = 128


class AnswerHeaders:
    """Answers with the X-Request-Id that came, or with a new one, and with X-Ignored-Fields where
    there are any."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        is_plain = given.isascii() and given.isprintable() and len(given) <= _LONGEST_ID
        request_id = given if given and is_plain else uuid.uuid4().hex
        ignored: list[str] = []
        OF_REQUEST.set(ignored)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if ignored:
                    headers[IGNORED_FIELDS] = header_of(ignored)
            await send(message)

        await self._app(scope, receive, with_headers)
