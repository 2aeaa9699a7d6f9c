"""The engine's work for one HTTP request: its prompts run together, their deltas come in one flow.

Leaving the flow early, by a disconnect or an error, aborts what still runs.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from headrace.base.errors import HeadraceError, TooLongError, longest_context
from headrace.request.messages import Delta, Submit
from headrace.request.outcome import OF_REQUEST, Finished
from headrace.serving.errors import ApiError, check_count, invalid, of_prompt
from headrace.serving.records import RequestRecord
from headrace.serving.service import Service

Deltas = AsyncGenerator[Delta, None]


class Generation:
    """An async context manager: entering it, the engine has accepted every prompt.

    Args:
        name: id of the answer, unique among those in flight.
        route: for the record.

    Raises:
        ApiError: on entering, when a prompt is refused or the engine is not ready; while iterating,
            when the engine dies or a step fails.
    """

    def __init__(
        self, service: Service, submits: Sequence[Submit], *, name: str, route: str, streams: bool
    ) -> None:
        params = submits[0].params
        asked = {each: getattr(params, each) for each in ("max_tokens", "temperature", "top_p")}
        self.record = RequestRecord(id=name, route=route, streams=streams, asked=asked)
        self.service, self._submits = service, submits
        self._streams: list[Deltas] = []
        self._firsts: list[Delta] = []
        self._is_closed = False
        self._prompt_tokens = [len(submit.prompt_token_ids) for submit in submits]
        self._cached_tokens = [0] * len(submits)
        self._token_at: dict[tuple[int, int], float] = {}  # of each choice, its latest

    async def __aenter__(self) -> Self:
        service, name = self.service, self.record.id
        _check_size(service, self._submits)
        engine = service.ready_engine()
        if name in service.in_flight:
            raise invalid(f"A request with the id {name!r} is in flight", "rid")
        service.in_flight[name] = tuple(submit.request_id for submit in self._submits)
        service.waiting.update(service.in_flight[name])
        self._streams = [engine.generate(submit) for submit in self._submits]
        try:
            self._firsts = await _accepted(self._streams)
        except BaseException as error:
            await self._close(error)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close(error)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(place of the prompt, what is new of one of its continuations), as they come."""
        for place, first in enumerate(self._firsts):
            yield place, self._counted(place, first)
        with of_prompt(None):
            if len(self._streams) == 1:
                async for delta in self._streams[0]:
                    yield 0, self._counted(0, delta)
            else:
                async with aclosing(_merged(self._streams)) as merged:
                    async for place, delta in merged:
                        yield place, self._counted(place, delta)
        await self._close(None)  # who reads the last words may ask at once for what was recorded

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens)

    def of_prompt(self, place: int) -> tuple[int, int]:
        """(tokens, cached tokens) of one prompt, as far as they are known."""
        return self._prompt_tokens[place], self._cached_tokens[place]

    def _counted(self, place: int, delta: Delta) -> Delta:
        record, submit = self.record, self._submits[place]
        self._cached_tokens[place] = max(self._cached_tokens[place], delta.cached_tokens)
        if delta.token_ids or delta.finished:
            self.service.waiting.discard(submit.request_id)
        if delta.token_ids:
            self._timed((place, delta.index), len(delta.token_ids))
        ending = delta.finished
        if ending is not None:
            record.queued(delta.queue_seconds)
            record.paths[place * submit.params.n + delta.index] = delta.paths
            if ending.reason == "error":
                raise _failure(ending)
            record.finishes.append(ending.reason)
        return delta

    def _timed(self, choice: tuple[int, int], count: int) -> None:
        """Tokens of a choice are here."""
        record, measures, now = self.record, self.service.measures, time.monotonic()
        record.output_tokens += count
        if record.first_token is None:
            record.first_token = now
            measures.first_token.observe(now - record.started)
        before = self._token_at.get(choice)
        if before is not None:
            measures.between_tokens.observe((now - before) / count, count)
        self._token_at[choice] = now

    async def _close(self, error: BaseException | None) -> None:
        """Leave nothing behind, once: what runs is aborted, the record ends."""
        for stream in self._streams:
            await stream.aclose()
        if self._is_closed:
            return
        self._is_closed = True
        service, record = self.service, self.record
        service.waiting.difference_update(service.in_flight.pop(record.id))
        record.prompt_tokens = self.prompt_tokens
        record.cached_tokens = self.cached_tokens
        record.ended = time.monotonic()
        if isinstance(error, Exception):
            record.failed()
        elif len(record.finishes) < sum(submit.params.n for submit in self._submits):
            record.finishes.append("disconnect")
        service.end(record)


def _failure(ending: Finished) -> ApiError:
    """The answer to a sequence that could not go on: a fault of what was asked, or ours."""
    if ending.stop_reason == OF_REQUEST:
        return invalid(ending.message, code="no_token_left")
    return ApiError(500, f"A step failed: {ending.message}", code="engine_error")


def _check_size(service: Service, submits: Sequence[Submit]) -> None:
    longest = service.info.max_model_len
    for place, submit in enumerate(submits):  # not only in the engine, which works meanwhile
        if (count := len(submit.prompt_token_ids)) > longest:
            with of_prompt(None if len(submits) == 1 else place):
                raise TooLongError(
                    f"The prompt has {count} tokens",
                    why=longest_context(longest),
                    remedy="Shorten the prompt",
                )
    asked = sum(submit.params.n for submit in submits)
    told = f"The request asks for {asked} continuations"
    check_count(asked, service.config.max_prompts, told, "n")


async def _accepted(streams: Sequence[Deltas]) -> list[Delta]:
    """The first delta of each; the first failure ends the others and is raised."""

    async def first(place: int | None, stream: Deltas) -> Delta:
        with of_prompt(place):
            return await anext(stream)

    if len(streams) == 1:
        return [await first(None, streams[0])]
    tasks = [asyncio.create_task(first(*each)) for each in enumerate(streams)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several streams. Their readers wait for ours, so that what piles up piles up
    in the engine's client, which joins it."""
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(1)

    async def read(place: int, stream: Deltas) -> None:
        try:
            async for delta in stream:
                await queue.put((place, delta))
            await queue.put((place, None))
        except HeadraceError as error:
            await queue.put((place, error))

    tasks = [asyncio.create_task(read(*each)) for each in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            place, news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                left -= 1
            else:
                yield place, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
