"""Routes that read a body and answer: from bytes to the request model in one go.

FastAPI parses JSON in Python objects, looks at them again for its dependencies and a third time for
the model: half of what a request of a thousand token ids costs in this process. Here pydantic
reads the bytes itself. What /openapi.json says comes from the function's signature as ever.
"""

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from headrace.serving.errors import ApiError, from_faults, invalid
from headrace.serving.service import service_of

BYTES_PER_ENTRY = 12  # a body of `max_body_bytes` may have one entry for so many of them


class BodyRoute(APIRoute):
    """For `route_class=` of a router whose functions take `body`, a model, and `service`, and have
    no other dependency."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        assert not self.dependencies, "they would not be asked"
        answer = self.endpoint
        model: type[BaseModel] = get_type_hints(answer)["body"]

        async def handle(request: Request) -> Response:
            service = await service_of(request)
            data = await _read(request)
            check_entries(data, service.config.max_body_bytes)
            try:
                body = model.model_validate_json(data)
            except ValidationError as error:
                raise from_faults(error.errors(include_url=False)) from None
            return await answer(body, service)  # type: ignore[no-any-return]

        return handle


async def _read(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise invalid("The body did not come whole") from None  # nobody is there to read it


def check_entries(data: bytes, most_bytes: int) -> None:
    """Bound the entries of a body before they become objects, which is done in one piece: nothing
    else runs meanwhile, not even an answer to /health. Commas tell, those in texts too, of which
    prose has one in eighty characters.

    Raises:
        ApiError: 413.
    """
    most = most_bytes // BYTES_PER_ENTRY
    if len(data) > most and (count := data.count(b",")) > most:
        raise ApiError(
            413,
            f"The body has {count:,} commas; at most {most:,} go, one for each {BYTES_PER_ENTRY} "
            "bytes of the option max_body_bytes",
            code="too_many_entries",
        )
