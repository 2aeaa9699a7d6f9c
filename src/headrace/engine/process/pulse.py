"""The line in the log that says how it goes, now and then while there is work."""

import time
from collections import Counter
from collections.abc import Callable

from headrace.base.log import get_logger
from headrace.engine.engine import Engine
from headrace.request.messages import Load

log = get_logger(__name__)

PULSE_SECONDS = 10.0


class Pulse:
    """At most one line every `seconds`; none while idle.

    Work that goes on has a line every `seconds`. Work that ends sooner has one at its end, unless
    there was one less than `seconds` ago. Rates are over the time with work since the line before.
    """

    def __init__(
        self,
        engine: Engine,
        seconds: float = PULSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._seconds, self._clock = engine, seconds, clock
        self._told_at = clock() - seconds
        self._began: float | None = None  # what goes on now, or the last line if that came later
        self._busy = 0.0  # earlier work since the last line
        self._load = Load()
        self._steps: Counter[str] = Counter()

    def before_step(self) -> None:
        """There is work."""
        if self._began is None:
            self._began = self._clock()

    def after_step(self) -> None:
        """A step was taken, perhaps the last one for now."""
        assert self._began is not None, "before_step comes first"
        now, is_last = self._clock(), not self._engine.has_work
        busy = self._busy + now - self._began
        is_due = now - self._told_at >= self._seconds and (is_last or busy >= self._seconds)
        if is_due:
            self._tell(busy)
            self._told_at, busy = now, 0.0
        if is_due or is_last:
            self._busy, self._began = busy, None if is_last else now

    def _tell(self, seconds: float) -> None:
        before, self._load = self._load, self._engine.load()
        load, steps = self._load, Counter[str]()
        for (path, _), count in self._engine.worker.runner.selector.counts.items():
            steps[path] += count
        prompt = load.prompt_tokens - before.prompt_tokens
        cached = load.cached_tokens - before.cached_tokens
        log.info(
            "running %d, waiting %d, KV %.1f %%, prompt %.1f tok/s (%.0f %% cached), "
            "output %.1f tok/s, steps %s in %.1f s",
            load.running,
            load.waiting,
            100 * load.kv_usage,
            prompt / max(seconds, 1e-9),
            100 * cached / max(prompt, 1),
            (load.output_tokens - before.output_tokens) / max(seconds, 1e-9),
            ", ".join(f"{path}:{count}" for path, count in (steps - self._steps).items()) or "none",
            seconds,
        )
        self._steps = steps
