"""From a generation to what goes over the wire: one JSON body, or a stream of events."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.base.log import get_logger
from headrace.serving.errors import ApiError
from headrace.serving.event_stream import DONE, EventStream, event, unless_disconnected
from headrace.serving.generation import Generation

log = get_logger(__name__)

INTERNAL = "The server failed; its log says why"


class WholeReply(Protocol):
    """Makes a reply from a generation that has begun."""

    async def whole(self) -> Any:
        """What msgspec encodes as the body."""
        ...


class Reply(WholeReply, Protocol):
    """Makes either form of a reply; one of the two methods is called, once."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Whole events, the last one included."""
        ...


class WholeAnswer(Response):
    """Runs the generation when the server sends it, and ends it when nobody listens any more.

    A refusal, which comes before anything is sent, is an ordinary error answer.
    """

    def __init__(self, generation: Generation, reply: WholeReply) -> None:
        super().__init__()
        self._generation, self._whole_reply = generation, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await unless_disconnected(self._whole(), receive)
        if body is not None:
            await json_response(body)(scope, receive, send)

    async def _whole(self) -> Any:
        async with self._generation:
            return await self._whole_reply.whole()


def failure_events(error: ApiError) -> bytes:
    """The end of a stream that fails, as OpenAI's clients read it."""
    return event(error.encoded()) + DONE


class Answer(WholeAnswer):
    """The same for a reply that may be streamed.

    Args:
        failed: the end of a stream that fails.
    """

    def __init__(
        self,
        generation: Generation,
        reply: Reply,
        failed: Callable[[ApiError], bytes] = failure_events,
    ) -> None:
        super().__init__(generation, reply)
        self._reply, self._failed = reply, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._generation.record.streams:
            await super().__call__(scope, receive, send)
            return
        async with self._generation:
            seconds = self._generation.service.config.ping_seconds
            await EventStream(self._events(), ping_seconds=seconds)(scope, receive, send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The reply's events; an error is an event too, at the end."""
        try:
            async with aclosing(self._reply.events()) as events:
                async for each in events:
                    yield each
            return
        except ApiError as error:
            failure = error
        except Exception:
            log.exception("A stream failed")
            failure = ApiError(500, INTERNAL)
        self._generation.record.failed()
        yield self._failed(failure)


def json_response(body: Any) -> Response:
    """`body` as msgspec encodes it."""
    return Response(msgspec.json.encode(body), media_type="application/json")
