"""From `Submit` messages to requests in the engine, or to refusals."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from headrace.base.errors import HeadraceError
from headrace.base.log import get_logger
from headrace.engine.engine import Engine
from headrace.engine.requests import PreparedRequest, RequestHandle
from headrace.request.messages import Failure, Refused, Submit

log = get_logger(__name__)

Result = TypeVar("Result")


class Entrance:
    """Holds a request until its grammar is compiled, so that a bad one is refused and not begun.

    Args:
        refuse: called with every refusal.
    """

    def __init__(self, engine: Engine, refuse: Callable[[Refused], None]) -> None:
        self._engine, self._refuse = engine, refuse
        self._held: dict[str, tuple[Submit, PreparedRequest]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._held

    @property
    def request_ids(self) -> list[str]:
        return list(self._held)

    def take(self, submit: Submit) -> None:
        """Check a request; `admit` queues it."""
        prepared = self._try(submit, partial(self._prepared, submit))
        if prepared is not None:
            self._held[submit.request_id] = submit, prepared

    def admit(self) -> list[RequestHandle]:
        """Queue what is ready, in the order in which it came."""
        handles = []
        for submit, prepared in tuple(self._held.values()):
            handle = self._try(submit, partial(self._queued, submit, prepared))
            if handle is not None:
                handles.append(handle)
        return handles

    def leave(self, request_ids: Iterable[str]) -> list[Submit]:
        """Let go of those that are held here; returns them."""
        held = (self._held.pop(request_id, None) for request_id in request_ids)
        return [entry[0] for entry in held if entry is not None]

    def _prepared(self, submit: Submit) -> PreparedRequest:
        if submit.pooling is not None:
            return self._engine.prepare_embedding(
                submit.prompt_token_ids, submit.pooling, text=submit.prompt_text
            )
        return self._engine.prepare(
            submit.prompt_token_ids,
            submit.params,
            text=submit.prompt_text,
            default_max_tokens=submit.default_max_tokens,
        )

    def _queued(self, submit: Submit, prepared: PreparedRequest) -> RequestHandle | None:
        if prepared.grammar is not None and prepared.grammar.poll() is None:
            return None
        handle = self._engine.submit(
            prepared,
            request_id=submit.request_id,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
        )
        del self._held[submit.request_id]
        return handle

    def _try(self, submit: Submit, work: Callable[[], Result]) -> Result | None:
        """The result; `None` after a refusal. Nothing that a request causes ends the engine."""
        try:
            return work()
        except HeadraceError as error:
            refusal = error
        except Exception as error:
            log.exception("Request %s could not be queued", submit.request_id)
            refusal = HeadraceError(
                "The request could not be queued", why=f"{type(error).__name__}: {error}"
            )
        self._held.pop(submit.request_id, None)
        self._refuse(Refused(submit.request_id, Failure.of(refusal)))
        return None
