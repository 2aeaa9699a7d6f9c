"""What all routes share: the engine, its tokenizer, the options, and the requests in flight."""

import asyncio
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from headrace.config.engine_config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.request.messages import EngineInfo
from headrace.serving.errors import ApiError, unavailable
from headrace.serving.ignored_fields import IgnoredFields
from headrace.serving.observability.engine_figures import EngineFigures
from headrace.serving.observability.history import History
from headrace.serving.observability.measures import Measures
from headrace.serving.readers import Readers
from headrace.serving.records import RequestRecord
from headrace.serving.server_config import ServerConfig, names
from headrace.text.tokenizer import Tokenizer
from headrace.version import __version__

REMEMBERED_RECORDS = 512
CONTROL_SECONDS = 20


@dataclass(slots=True, kw_only=True)
class Service:
    """One server's state. Everything in it belongs to one event loop.

    Attributes:
        engine: `None` until the engine is ready for the first time.
        tokenizer: `None` for a checkpoint of token ids alone, and before the engine is ready.
        is_draining: SIGTERM came; nothing new is taken.
        in_flight: id of the answer -> ids of the engine's requests behind it.
        waiting: the engine's requests without a first token.
        records: what ended lately, newest last. observers: called with each record as it ends;
            metrics and status pages hang on here.
        measures, history, figures: for metrics and the status page.
        readers: how answers are read; what the model shows counts once it has loaded.
        ignored: fields of requests that had no effect.
        rendering: bounds the chat templates that are rendered at once.
    """

    config: ServerConfig
    asked: EngineConfig
    engine: EngineClient | None = None
    tokenizer: Tokenizer | None = None
    is_draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    in_flight: dict[str, tuple[str, ...]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    records: "OrderedDict[str, RequestRecord]" = field(default_factory=OrderedDict)
    observers: list[Callable[[RequestRecord], None]] = field(default_factory=list)
    measures: Measures = field(default_factory=Measures)
    history: History = field(init=False)
    figures: EngineFigures = field(default_factory=EngineFigures)
    readers: Readers = field(init=False)
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    rendering: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))

    def __post_init__(self) -> None:
        self.history = History(self.measures)
        self.readers = Readers.of(self.config, self.tokenizer)

    def loaded(self, engine: EngineClient, tokenizer: Tokenizer | None) -> None:
        """The engine is ready, and this is its tokenizer."""
        self.engine, self.tokenizer = engine, tokenizer
        self.readers = Readers.of(self.config, tokenizer, engine.info.architecture)

    @property
    def state(self) -> str:
        """starting, ready, stalled, draining or dead."""
        if self.is_draining:
            return "draining"
        if self.engine is None:
            return "starting"
        return "stalled" if self._is_stalled(self.engine) else self.engine.state

    def _is_stalled(self, engine: EngineClient) -> bool:
        return engine.state == "ready" and engine.silent_seconds > self.config.stall_seconds

    @property
    def trouble(self) -> str:
        """Why the engine is dead or stalled, in words; empty while it is neither."""
        engine = self.engine
        if engine is not None and self._is_stalled(engine):
            return f"it has work, and showed no life for {engine.silent_seconds:.0f} s"
        return "" if engine is None else engine.death

    @property
    def info(self) -> EngineInfo:
        """What is known of the engine. Raises 503 while it starts for the first time."""
        return self.started_engine.info

    @property
    def started_engine(self) -> EngineClient:
        """The engine, alive or not. Raises 503 before it has been ready."""
        if self.engine is None:
            raise unavailable("The model is loading", "starting", retry_after=5)
        return self.engine

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names the model answers to; the first is the one in replies."""
        return names(self.config.served_model_name) or (self.asked.model,)

    @property
    def fingerprint(self) -> str:
        """Changes with version, model, device, dtype and backends."""
        known = zlib.crc32(f"{self.asked.model} {self.info.summary}".encode())
        return f"headrace-{__version__}-{known:08x}"

    def ready_engine(self) -> EngineClient:
        """The engine, for a request that is about to be sent.

        Raises:
            ApiError: 503 while it starts, hangs, drains or is dead, or when the queue is full.
        """
        engine = self.started_engine
        state = self.state
        if state == "draining":
            raise unavailable("The server is stopping", "draining", retry_after=10)
        if state == "starting":
            raise unavailable("The engine is starting again", "starting", retry_after=5)
        if state == "dead":
            raise unavailable(f"The engine is dead: {self.trouble}", "engine_dead", retry_after=5)
        if state == "stalled":
            raise unavailable(f"The engine is stalled: {self.trouble}", "stalled", retry_after=5)
        if len(self.waiting) >= self.config.max_queued_requests:
            raise unavailable(
                f"{len(self.waiting)} requests wait already, as many as max_queued_requests allows",
                "queue_full",
            )
        return engine

    async def control(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call the engine by name, between two of its steps; see `EngineClient.control`.

        Raises:
            ApiError: 503 when no step ended for long, as when a device hangs.
        """
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                return await self.started_engine.control(name, **arguments)
        except TimeoutError:
            raise unavailable(
                f"The engine did not answer within {CONTROL_SECONDS} s", "slow"
            ) from None

    def check_model(self, name: str | None) -> str:
        """The name to answer with. `None`, "" and "default" mean the model that is here.

        Raises:
            ApiError: 404 for another model.
        """
        served = self.model_names
        if not name or name == "default":
            return served[0]
        if not self.config.check_model_name or name in served or name == self.asked.model:
            return name
        raise ApiError(
            404,
            f"The model {name[:200]!r} is not here; this server has {', '.join(served)[:500]}",
            param="model",
            code="model_not_found",
        )

    def end(self, record: RequestRecord) -> None:
        """Take in a request that ended, however it ended."""
        self.records[record.id] = record
        while len(self.records) > REMEMBERED_RECORDS:
            self.records.popitem(last=False)
        self.measures.ended(record)
        for observer in self.observers:
            observer(record)


async def service_of(request: Request) -> Service:
    """The service of the app that got the request; for `Depends`.

    Async although it waits for nothing: FastAPI gives other functions to a pool of threads.
    """
    service: Any = request.app.state.service
    assert isinstance(service, Service)
    return service
