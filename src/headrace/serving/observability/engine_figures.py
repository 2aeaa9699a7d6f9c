"""What the engine tells when asked, kept so that nobody waits for a busy or a dead one."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.base.errors import HeadraceError
from headrace.engine.client import EngineClient

KEPT_STEPS = 512

Reply = dict[str, Any]
Refused = list[tuple[str, str, str]]


class EngineFigures:
    """The latest replies to `stats` and `steps`. One question of a kind is under way at a time,
    however many ask; it goes on when they stop waiting.

    Attributes:
        stats: empty before the first reply; counts of the engine that runs now, or ran last.
        steps: (serial, refused paths, row) of steps as `StepHistory.as_dict` has them; serials go
            on when the engine is started again.
    """

    def __init__(self) -> None:
        self.stats: Reply = {}
        self.step_fields: list[str] = []
        self.steps: deque[tuple[int, Refused, list[Any]]] = deque(maxlen=KEPT_STEPS)
        self._stats_at: float | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._serial = self._number = self._pid = self._refused = 0

    @property
    def age(self) -> float | None:
        """Seconds since `stats` came; `None` before that."""
        return None if self._stats_at is None else time.monotonic() - self._stats_at

    async def ask_stats(self, engine: EngineClient, seconds: float) -> bool:
        """Bring `stats` up to date; False when no reply came in so many seconds."""
        return await self._ask(engine, "stats", self._take_stats, seconds)

    async def ask_steps(self, engine: EngineClient, seconds: float) -> bool:
        """Bring `steps` up to date; False when no reply came in so many seconds."""
        if engine.info.pid != self._pid:
            self._pid, self._number = engine.info.pid, 0  # another engine counts from 1 again
        return await self._ask(engine, "steps", self._take_steps, seconds, after=self._number)

    def steps_after(self, serial: int) -> Reply:
        """Those after `serial`, each reason once: `refused` of a row is a place in `reasons`."""
        new = [each for each in self.steps if each[0] > serial]
        places: dict[str, int] = {}
        reasons: list[Refused] = []
        rows = []
        for _, refused, row in new:
            place = places.setdefault(repr(refused), len(reasons))
            if place == len(reasons):
                reasons.append(refused)
            rows.append([*row[: self._refused], place, *row[self._refused + 1 :]])
        last = new[-1][0] if new else serial
        return {"fields": self.step_fields, "last": last, "reasons": reasons, "rows": rows}

    async def _ask(
        self,
        engine: EngineClient,
        name: str,
        take: Callable[[Reply], None],
        seconds: float,
        **arguments: Any,
    ) -> bool:
        if engine.state not in ("ready", "draining"):
            return False
        task = self._asking.get(name)
        if task is None:
            task = asyncio.create_task(self._question(engine, name, take, arguments))
            self._asking[name] = task
        done, _ = await asyncio.wait([task], timeout=seconds)
        return bool(done) and task.exception() is None

    async def _question(
        self, engine: EngineClient, name: str, take: Callable[[Reply], None], arguments: Reply
    ) -> None:
        pid = engine.info.pid
        try:
            reply = await engine.control(name, **arguments)
        except HeadraceError:
            return  # it died meanwhile, which its state says; what was known stays
        finally:
            del self._asking[name]
        if pid == engine.info.pid:
            take(reply)

    def _take_stats(self, reply: Reply) -> None:
        self.stats, self._stats_at = reply, time.monotonic()

    def _take_steps(self, reply: Reply) -> None:
        self.step_fields = list(reply["fields"])
        self._refused = self.step_fields.index("refused")
        for row in reply["steps"]:
            if row[0] <= self._number:
                continue  # told before
            self._serial += 1
            self._number = row[0]
            self.steps.append((self._serial, reply["reasons"][row[self._refused]], list(row)))
