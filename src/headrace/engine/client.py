"""The engine in a process of its own, as an asyncio program sees it."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal

from headrace.config.engine_config import EngineConfig
from headrace.request.messages import Delta, EngineInfo, Load, Submit

State = Literal["starting", "ready", "draining", "dead"]


class EngineClient:
    """Starts an engine and speaks with it. One event loop, one thread.

    Attributes:
        state: starting (also while it is started again), ready, draining, dead.
        load: how busy the engine was at its latest turn; never waits for it.
        death: why it is dead; empty while it is not.
    """

    state: State
    load: Load
    death: str

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        restart: bool = False,
        program: Sequence[str] = (),
    ) -> "EngineClient":
        """Start the engine's process and wait until it is ready.

        Args:
            restart: start another one whenever it dies.
            program: command line of the child without its options; tests put their own here.

        Raises:
            HeadraceError: what the engine refused to start with, as `LLM(...)` would raise it.
            EngineDeadError: its process ended before it was ready.
        """
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready (the first time, while it restarts)."""
        raise NotImplementedError

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """Run a request; closing or cancelling the iteration aborts it.

        The first delta comes as soon as the engine has accepted the request, and is usually empty:
        send headers then. What piles up while nobody iterates comes as one delta per continuation.
        The iteration ends after the endings of all `params.n` continuations.

        Raises:
            RequestError: it was refused, before the first delta.
            UnavailableError: the engine starts or drains, before the first delta.
            EngineDeadError: the engine died; at any time.
        """
        raise NotImplementedError
        yield

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; each gets its ending, "abort". Unknown ones are left alone."""

    async def control(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call one of `stats`, `explain`, `flush_cache`, `start_profile`, `stop_profile`.

        Raises:
            HeadraceError: what the engine refused; UnavailableError, EngineDeadError as above.
        """
        raise NotImplementedError

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Drain for so long, abort the rest, end the process. Twice is fine."""

    async def wait_dead(self) -> str:
        """Wait until the engine is dead for good (stopped, or died without restart); why."""
        raise NotImplementedError
