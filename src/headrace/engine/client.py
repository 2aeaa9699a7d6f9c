"""The engine in a process of its own, as an asyncio program sees it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import count
from typing import Any, Literal

from headrace.base.errors import EngineDeadError, HeadraceError, RequestError, UnavailableError
from headrace.base.log import get_logger
from headrace.config.engine_config import EngineConfig
from headrace.engine.child_process import PROGRAM, ChildProcess
from headrace.engine.delta_stream import DeltaStream
from headrace.request.messages import (
    Abort,
    Control,
    ControlReply,
    Delta,
    Draining,
    EngineInfo,
    FromEngine,
    Load,
    Ready,
    Refused,
    StartFailed,
    Stop,
    Submit,
    ToEngine,
    Turn,
)

log = get_logger(__name__)

State = Literal["starting", "ready", "draining", "dead"]

STOP_MARGIN_SECONDS = 10.0
_STOPPED = "it was asked to stop"
_SEND_AGAIN = "Send the request again once the engine is back"


class EngineClient:
    """Starts an engine and speaks with it. One event loop, in one thread.

    Attributes:
        state: starting (also while it is started again), ready, draining, dead.
        load: how busy the engine was at its latest turn; never waits for it.
        death: why it is dead; empty while it is not.
        restarts: how often it was started again.
    """

    def __init__(self, config: EngineConfig, *, restart: bool, program: Sequence[str]) -> None:
        self.state: State = "starting"
        self.load = Load()
        self.death = ""
        self.restarts = 0
        self._config, self._restart, self._program = config, restart, program
        self._info: EngineInfo | None = None
        self._child: ChildProcess | None = None
        self._ready: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._restarting: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # the child has ended
        self._dead = asyncio.Event()  # for good
        self._streams: dict[str, DeltaStream] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._silent_since: float | None = None  # when it was last heard, or asked after its rest
        self._call_ids = count()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        restart: bool = False,
        program: Sequence[str] = PROGRAM,
    ) -> "EngineClient":
        """Start the engine's process and wait until it is ready.

        Args:
            restart: start another one whenever it dies; a start that fails is not tried again.
            program: command line of the child without its options; tests put their own here.

        Raises:
            HeadraceError: what the engine refused to start with, as `LLM(...)` would raise it.
            EngineDeadError: its process ended before it was ready.
        """
        client = cls(config, restart=restart, program=program)
        await client._start_child()
        return client

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        assert self._info is not None, "`start` waits for it"
        return self._info

    @property
    def silent_seconds(self) -> float:
        """How long nothing was heard of the engine although it owes an answer. While it works it
        shows life between any two steps, so this is about the length of the longest one."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    # ---- requests

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """Run a request; closing or cancelling the iteration aborts it.

        The first delta comes as soon as the engine has accepted the request, and is usually empty:
        send headers then. What piles up while nobody iterates comes as one delta for each
        continuation. The iteration ends after the endings of all `params.n` continuations.

        Raises:
            RequestError: it was refused, before the first delta.
            UnavailableError: the engine starts or drains, before the first delta.
            EngineDeadError: the engine died; at any time.
        """
        stream = self._submit(submit)
        try:
            while deltas := await stream.take():
                for delta in deltas:
                    yield delta
        finally:
            self._leave(stream)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; each gets its ending, "abort". Unknown ones are left alone."""
        known = [request_id for request_id in request_ids if request_id in self._streams]
        if known:
            self._send(Abort(known))

    async def control(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call one of `stats`, `steps`, `explain`, `flush_cache`, `start_profile`, `stop_profile`,
        `start_expert_distribution`, `stop_expert_distribution`, `dump_expert_distribution`.

        Answered between two steps; give it a deadline with `asyncio.timeout` where that matters.

        Raises:
            HeadraceError: what the engine refused; UnavailableError, EngineDeadError: it cannot be
                asked.
        """
        self._check_state(allowed=("ready", "draining"))
        call_id = next(self._call_ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._send(Control(call_id, name, arguments))
            return await answer
        finally:
            self._calls.pop(call_id, None)

    # ---- the end

    async def stop(
        self, drain_seconds: float = 0.0, *, margin_seconds: float = STOP_MARGIN_SECONDS
    ) -> None:
        """Drain for so long, abort the rest, end the process. Twice is fine.

        Args:
            margin_seconds: after the drain, for the step in flight; then the process is killed.
        """
        self._is_stopping = True
        if self._child is not None:
            if self.state == "starting":
                self._child.kill()
            else:
                self.state = "draining"
                self._child.send(Stop(drain_seconds))
            try:
                await asyncio.wait_for(self._gone.wait(), drain_seconds + margin_seconds)
            except TimeoutError:
                log.error("The engine does not stop: its process is killed")
                self._present_child().kill()
        await self._dead.wait()

    async def wait_dead(self) -> str:
        """Wait until the engine is dead for good (stopped, or died without restart); why."""
        await self._dead.wait()
        return self.death

    # ---- inside

    async def _start_child(self) -> None:
        """Start a child and wait until it is ready; without one when it raises."""
        self.state = "starting"
        self._gone.clear()
        self._ready = asyncio.get_running_loop().create_future()
        try:
            self._child = ChildProcess(self._config, self._program, self._take, self._exited)
            await self._ready
        except BaseException as error:
            await self._give_up(error)
            raise

    async def _give_up(self, error: BaseException) -> None:
        """A start failed; its child, if it has not ended yet, ends."""
        if self._child is not None:
            self._child.kill()
            await self._gone.wait()
        self._die(str(error) or "its start was cancelled")

    async def _start_again(self) -> None:
        if self._is_stopping:
            self._die(_STOPPED)
            return
        try:
            await self._start_child()
        except HeadraceError as error:
            if not self._is_stopping:
                log.error("The engine could not be started again: %s", error)
        else:
            self.restarts += 1
            log.warning("The engine was started again")

    def _present_child(self) -> ChildProcess:
        assert self._child is not None, "there is a child while the state says so"
        return self._child

    def _send(self, message: ToEngine) -> None:
        self._present_child().send(message)
        if self._silent_since is None:
            self._silent_since = time.monotonic()

    def _check_state(self, allowed: tuple[State, ...] = ("ready",)) -> None:
        if self.state in allowed:
            return
        if self.state == "dead":
            raise EngineDeadError("The engine is dead", why=self.death)
        if self.state == "starting":
            raise UnavailableError("The engine is starting", remedy=_SEND_AGAIN)
        raise UnavailableError("The engine takes nothing new", why="it is being stopped")

    def _submit(self, submit: Submit) -> DeltaStream:
        self._check_state()
        request_id = submit.request_id
        if request_id in self._streams:
            raise RequestError(f"Request id {request_id!r} is in flight already")
        try:
            self._send(submit)
        except (ValueError, OverflowError, TypeError) as error:  # half a character, 2**70
            raise RequestError("The request cannot be sent on", why=str(error)) from error
        stream = DeltaStream(request_id, submit.params.n)
        self._streams[request_id] = stream
        return stream

    def _leave(self, stream: DeltaStream) -> None:
        """The consumer is gone. The id is free again when the engine has ended the request, so that
        no later request of that id gets this one's ending."""
        stream.leave()
        if not stream.is_complete:
            self._send(Abort([stream.request_id]))

    # ---- from the child

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Turn):
            self.load = message.load
            for delta in message.deltas:
                stream = self._streams[delta.request_id]
                stream.put(delta)
                if stream.is_complete:
                    del self._streams[delta.request_id]
        elif isinstance(message, Refused):
            self._streams.pop(message.request_id).fail(message.failure.error())
        elif isinstance(message, ControlReply):
            self._answer(message)
        elif isinstance(message, Draining):
            self.state = "draining"
        elif isinstance(message, Ready):
            self.state, self._info, self.load = "ready", message.info, message.load
            self._settle_start(None)
        elif isinstance(message, StartFailed):
            self._settle_start(message.failure.error())
        owes = bool(self._streams or self._calls)
        self._silent_since = time.monotonic() if owes else None

    def _answer(self, reply: ControlReply) -> None:
        answer = self._calls.pop(reply.call_id, None)
        if answer is None or answer.done():
            return  # who asked has gone
        if reply.failure is not None:
            answer.set_exception(reply.failure.error())
        else:
            answer.set_result(reply.result or {})

    def _settle_start(self, error: HeadraceError | None) -> None:
        """Tell who waits for the start, unless it was told or has gone."""
        if self._ready is None or self._ready.done():
            return
        if error is not None:
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)

    def _exited(self, reason: str) -> None:
        """The child is gone, after its last message."""
        reason = _STOPPED if self._is_stopping else reason
        self._child = None
        self._gone.set()
        for stream in self._streams.values():
            stream.fail(_died(f"The engine ended while request {stream.request_id} ran", reason))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_died("The engine ended before it answered", reason))
        self._streams.clear()
        self._silent_since = None
        self.load = Load()
        if self.state == "starting":
            self._settle_start(EngineDeadError("The engine ended before it was ready", why=reason))
        elif self.state == "ready" and self._restart and not self._is_stopping:
            log.error("The engine died: %s; it is started again", reason)
            self.state = "starting"
            self._restarting = asyncio.get_running_loop().create_task(self._start_again())
        else:
            self._die(reason)

    def _die(self, reason: str) -> None:
        self.state, self.death = "dead", reason
        self._dead.set()


def _died(what: str, reason: str) -> EngineDeadError:
    return EngineDeadError(what, why=reason, remedy=_SEND_AGAIN)
