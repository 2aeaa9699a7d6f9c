"""Deltas of one request between the reader of the socket and who consumes them."""

import asyncio

import msgspec

from headrace.base.errors import HeadraceError
from headrace.request.messages import Delta

MERGE_EVERY = 32  # deltas of one continuation that may wait before they become one


class DeltaStream:
    """Never makes the reader wait: what piles up is merged, one delta for each continuation.

    What a consumer who does not consume costs is therefore the output itself, which `max_tokens`
    bounds.

    Args:
        count: continuations, each of which ends once.
    """

    def __init__(self, request_id: str, count: int) -> None:
        self.request_id = request_id
        self._endings_left = count
        self._pending: dict[int, list[Delta]] = {}
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_left = False

    @property
    def is_complete(self) -> bool:
        """The engine will say nothing more about it."""
        return self._endings_left == 0 or self._error is not None

    # ---- from the reader

    def put(self, delta: Delta) -> None:
        if delta.finished is not None:
            self._endings_left -= 1
        if self._is_left:
            return
        waiting = self._pending.setdefault(delta.index, [])
        waiting.append(delta)
        if len(waiting) == MERGE_EVERY:
            waiting[:] = [merged(waiting)]
        self._wake()

    def fail(self, error: HeadraceError) -> None:
        """Nothing more comes; the consumer gets the error after what came before it."""
        self._error = error
        self._wake()

    # ---- from the consumer

    async def take(self) -> list[Delta]:
        """What is new, one delta for each continuation, and one more where it failed behind what it
        had made; empty after the last ending.

        Raises:
            HeadraceError: the request was refused, or its engine died.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._endings_left == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._pending = self._pending, {}
        return [part for deltas in taken.values() for part in _in_parts(merged(deltas))]

    def leave(self) -> None:
        """Nobody consumes any more; what still comes is dropped."""
        self._is_left = True
        self._pending.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(deltas: list[Delta]) -> Delta:
    """Deltas of one continuation, in their order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    prompt_logprobs = [each.prompt_logprobs for each in deltas if each.prompt_logprobs is not None]
    has_logprobs = any(each.logprobs is not None for each in deltas)
    return Delta(
        request_id=first.request_id,
        index=first.index,
        text="".join([each.text for each in deltas]),
        token_ids=[token for each in deltas for token in each.token_ids],
        logprobs=[entry for each in deltas for entry in each.logprobs or ()]
        if has_logprobs
        else None,
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
        finished=last.finished,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        paths=last.paths,
        queue_seconds=last.queue_seconds,
        embedding=last.embedding,
        hidden_states=last.hidden_states,
        routed_experts=last.routed_experts,
    )


def _in_parts(delta: Delta) -> tuple[Delta, ...]:
    """A failure comes after the tokens before it: who hears of it may stop to listen."""
    if delta.finished is None or delta.finished.reason != "error" or not delta.token_ids:
        return (delta,)
    made = msgspec.structs.replace(delta, finished=None)
    failed = msgspec.structs.replace(
        delta, text="", token_ids=[], logprobs=None, prompt_logprobs=None
    )
    return made, failed
