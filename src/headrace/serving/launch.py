"""`headrace serve`: engine, HTTP, signals, and the way out.

HTTP answers at once, 503 while the model loads. The first SIGTERM, SIGINT or SIGHUP lets requests
end for `drain_seconds`, while new ones are answered 503; the second ends everything at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from headrace.base.errors import ConfigError
from headrace.base.garbage import set_aside_what_stays
from headrace.base.log import get_logger
from headrace.config.engine_config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.serving.app import make_app
from headrace.serving.descriptors import open_as_many_as_allowed
from headrace.serving.http_protocol import BoundedHttp
from headrace.serving.parsers.choice import NONE
from headrace.serving.prompts import load_tokenizer
from headrace.serving.records import log_record
from headrace.serving.server_config import ServerConfig
from headrace.serving.service import Service

if TYPE_CHECKING:
    from headrace.serving.observability.tracing import Tracing

log = get_logger(__name__)

OK, ENGINE_DIED = 0, 1
_GRACE_SECONDS = 5  # after the drain, for aborted requests to be told so
# Proxies keep connections for 60 s as a rule, those written in Go for 90 or 120, Google's for 600:
# who keeps one longer than the other sends requests into a connection that is just being closed.
_KEEP_ALIVE_SECONDS = 620
_AT_ONCE_SECONDS = 1  # after a second signal, for an engine that may hang, and for last words
_LOOK_SECONDS = 0.05  # between two looks at what still runs


def serve(asked: EngineConfig, config: ServerConfig, listening: socket.socket) -> int:
    """Serve until a signal comes or the engine is dead for good.

    Args:
        listening: where; see `address.bind`.

    Returns:
        0 after a signal and a drain, 1 after the engine's death, 128 + n after a second signal n.

    Raises:
        HeadraceError: the model cannot be served.
    """
    open_as_many_as_allowed(config.max_queued_requests)
    with contextlib.closing(listening), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(Server(asked, config, listening).run())


class Server:
    """One run of the server, from the start of the engine to the end of both."""

    def __init__(self, asked: EngineConfig, config: ServerConfig, listening: socket.socket) -> None:
        self._config, self._listening = config, listening
        self._url = _url(config, listening)
        self.service = Service(config=config, asked=asked)
        if config.log_requests:
            self.service.observers.append(log_record)
        self._tracing = _tracing(self.service)
        self._http = _Http(_uvicorn_config(self.service))
        self._signals = 0
        self._status = OK
        self._draining: asyncio.Task[None] | None = None
        self._hurrying: asyncio.Task[None] | None = None  # held, so that it is not collected

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        log.info("Loading %s; %s answers 503 meanwhile", self.service.asked.model, self._url)
        heard = _signals()
        for each in heard:
            loop.add_signal_handler(each, self._stop, each)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listening]))
        living = asyncio.create_task(self._live())
        sampling = asyncio.create_task(self.service.history.run(lambda: self.service.engine))
        try:
            await asyncio.wait([serving, living], return_when=asyncio.FIRST_COMPLETED)
            if living.done() and living.exception() is None and not self._signals:
                self._status = ENGINE_DIED
            self._http.should_exit = True
            await serving
            return self._status
        finally:
            sampling.cancel()
            if self._draining is not None:
                self._draining.cancel()
            await self._end_engine(living)
            await self._http.end(_AT_ONCE_SECONDS)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            for each in heard:
                loop.remove_signal_handler(each)

    async def _live(self) -> None:
        """Start the engine and wait until it is dead for good.

        Raises:
            HeadraceError: it cannot be started.
        """
        service, config = self.service, self._config
        asked = service.asked
        restart = config.on_engine_death == "restart"
        engine, tokenizer = await asyncio.gather(
            EngineClient.start(asked, restart=restart), asyncio.to_thread(load_tokenizer, asked)
        )
        service.loaded(engine, tokenizer)
        set_aside_what_stays()
        if not self._signals:
            self._tell_ready()
        reason = await engine.wait_dead()
        if not self._signals:
            log.error("The engine is dead: %s", reason)

    async def _end_engine(self, living: "asyncio.Task[None]") -> None:
        """Let nothing of the engine outlive the server; a start that failed is raised."""
        engine = self.service.engine
        if engine is not None:
            await engine.stop(0.0)
        if not living.done():
            living.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await living

    def _tell_ready(self) -> None:
        info = self.service.info
        for decision in self.service.readers.decisions:
            log.info("%s", decision)
        tokenizer = self.service.tokenizer
        reads_calls = self.service.readers.tool_parser.value != NONE
        if reads_calls and tokenizer is not None and "tools" not in tokenizer.template_variables:
            log.warning("The chat template does not show tools, so the model never sees them")
        log.info(
            "%s on %s, ready after %.1f s: %s/v1; status page: %s/",
            self.service.model_names[0],
            info.summary,
            info.start_seconds,
            self._url,
            self._url,
        )

    # ---- the end

    def _stop(self, number: signal.Signals) -> None:
        self._signals += 1
        self.service.is_draining = True
        if self._signals == 1:
            self._draining = asyncio.create_task(self._drain())
            return
        log.warning("Stopping at once")
        self._status = 128 + number
        self._http.should_exit = self._http.force_exit = True
        if (engine := self.service.engine) is not None:
            stopping = engine.stop(0.0, margin_seconds=_AT_ONCE_SECONDS)
            self._hurrying = asyncio.create_task(stopping)

    async def _drain(self) -> None:
        """Let requests end, abort those that are late, and hang up: until then who asks is told."""
        service, seconds = self.service, self._config.drain_seconds
        log.info("Stopping: %d requests may end within %d s", len(service.in_flight), seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while service.in_flight:
                    await asyncio.sleep(_LOOK_SECONDS)
        self._http.should_exit = True
        late = [each for ids in service.in_flight.values() for each in ids]
        if late and service.engine is not None:
            log.warning("Stopping: %d requests are aborted", len(service.in_flight))
            await service.engine.abort(late)
        await asyncio.sleep(_GRACE_SECONDS)
        if service.in_flight and service.engine is not None:  # it hangs: its end is told instead
            await service.engine.stop(0.0, margin_seconds=_AT_ONCE_SECONDS)
            await self._http.end(_AT_ONCE_SECONDS)
        self._http.hang_up()


def _signals() -> list[signal.Signals]:
    """Those that end the server. Under `nohup` the end of the terminal does not; ctrl-c may come to
    a job in the background, for which shells have it ignored."""
    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if has_nohup else [signal.SIGHUP])]


def _url(config: ServerConfig, listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _tracing(service: Service) -> "Tracing | None":
    """Raises `HeadraceError` where traces are asked for and cannot be."""
    endpoint = service.config.otlp_traces_endpoint
    if endpoint is None:
        return None
    from headrace.serving.observability.tracing import Tracing

    tracing = Tracing.to(endpoint, service.model_names[0])
    service.observers.append(tracing.observe)
    return tracing


class _Http(uvicorn.Server):
    """Without signal handlers: they belong to `Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def end(self, seconds: float) -> None:
        """Let what streams were told of their end go out for so long."""
        for _ in range(2):  # before and after hanging up
            if tasks := tuple(self.server_state.tasks):
                await asyncio.wait(tasks, timeout=seconds)
            self.hang_up()

    def hang_up(self) -> None:
        """Leave clients that do not read what they asked for, or do not send what they began."""
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def _uvicorn_config(service: Service) -> uvicorn.Config:
    config = service.config
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name} is {path!r}", why="there is no such file")
    # Its warnings are about what clients send, who are told; anybody could fill the log with them.
    errors = logging.getLogger("uvicorn.error")
    errors.setLevel(logging.ERROR)
    for handler in logging.getLogger("headrace").handlers:
        errors.addHandler(handler)
    try:
        made = uvicorn.Config(
            make_app(service),
            http=BoundedHttp,
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=2 * _GRACE_SECONDS,
            lifespan="off",
        )
        made.load()
    except OSError as error:
        raise ConfigError("The certificate cannot be used", why=str(error)) from error
    return made


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    return uvicorn.Config(app="", log_config=None).get_loop_factory()
