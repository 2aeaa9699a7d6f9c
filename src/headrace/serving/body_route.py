"""Routes that read a body and answer: from bytes to the request model in one go.

FastAPI parses JSON in Python objects, looks at them again for its dependencies and a third time for
the model: half of what a request of a thousand token ids costs in this process. Here pydantic
reads the bytes itself. What /openapi.json says comes from the function's signature as ever.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.serving.errors import ApiError, answer_to, invalid, of_fields
from headrace.serving.records import TRACE_PARENT
from headrace.serving.service import service_of

BYTES_PER_PART = 15  # a body of `max_body_bytes` may have one part for so many of them


class ShortWay:
    """Middleware: to the routes of this kind without FastAPI's search and its layers around an
    answer, a sixth of what a request costs in this process.

    Only what the table knows goes this way, the rest (a path below `root_path`, a method that is
    not allowed) to the router, which has the same routes.

    Args:
        routes: of the app.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[APIRoute]) -> None:
        self._app = app
        self._handlers = {
            (method, route.path): route.get_route_handler()
            for route in routes
            if isinstance(route, BodyRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = None
        if scope["type"] == "http":
            handle = self._handlers.get((scope["method"], scope["path"]))
        if handle is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handle(Request(scope, receive, send))
            await response(scope, receive, send)
        except (ApiError, HeadraceError) as error:  # an answer raises them before it begins
            await answer_to(error).response()(scope, receive, send)


class BodyRoute(APIRoute):
    """For `route_class=` of a router whose functions take `body`, a model, and `service`, and have
    no other dependency."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        assert not self.dependencies, "they would not be asked"
        answer = self.endpoint
        model: type[BaseModel] = get_type_hints(answer)["body"]

        async def handle(request: Request) -> Response:
            service = await service_of(request)
            TRACE_PARENT.set(request.headers.get("traceparent", ""))
            data = await _read(request)
            check_parts(data, service.config.max_body_bytes)
            with of_fields():
                body = model.model_validate_json(data)
            return await answer(body, service)  # type: ignore[no-any-return]

        return handle


async def _read(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise invalid("The body did not come whole") from None  # nobody is there to read it


def check_parts(data: bytes, most_bytes: int) -> None:
    """Bound the parts of a body before they become objects, which is done in one piece: nothing
    else runs meanwhile, not even an answer to /health.

    Their marks are counted, those in texts too. A list, an object and a key take twice the time of
    a number. A prompt of a million token ids passes, and so does any prose.

    Raises:
        ApiError: 413.
    """
    most = most_bytes // BYTES_PER_PART
    if len(data) <= most:
        return
    count = data.count(b",") + 2 * sum(data.count(mark) for mark in (b":", b"[", b"{"))
    if count > most:
        raise ApiError(
            413,
            f"The body has too many parts: commas, and twice its colons and opening brackets, are "
            f"{count:,}; at most {most:,} go, one for each {BYTES_PER_PART} bytes of the option "
            "max_body_bytes",
            code="too_many_parts",
        )
