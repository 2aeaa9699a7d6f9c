"""The last ten minutes, a sample a second, kept whether or not anybody looks."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.engine.client import EngineClient
from headrace.request.messages import Load
from headrace.serving.observability.measures import Measures

SECONDS = 600
RATE_SECONDS, LATENCY_SECONDS, HIT_SECONDS = 3, 5, 10
"""Seconds that a sample's rates, percentiles and hit rate are about; they smooth the lines."""


class Sample(NamedTuple):
    """One second. Rates are per second, of the last `RATE_SECONDS`; what nothing was measured of is
    `None`.

    Attributes:
        number: counts samples from 1. at: wall clock.
        kv_usage: share of the KV pool that running sequences hold. kv_cached: that the prefix cache
            holds, shared with them or not.
        hit_rate: cached share of the prompt tokens of the last `HIT_SECONDS`.
        first_token_p50, ...: seconds, of the last `LATENCY_SECONDS`.
    """

    number: int
    at: float
    prompt_rate: float
    output_rate: float
    running: int
    waiting: int
    kv_usage: float
    kv_cached: float
    hit_rate: float | None
    first_token_p50: float | None
    first_token_p95: float | None
    between_tokens_p50: float | None
    between_tokens_p95: float | None


class History:
    """Samples of one server; `run` takes them."""

    def __init__(self, measures: Measures, clock: Callable[[], float] = time.monotonic) -> None:
        self.samples: deque[Sample] = deque(maxlen=SECONDS)
        self._measures, self._clock = measures, clock
        self._number = 0
        self._loads = deque([(clock(), Load())], maxlen=HIT_SECONDS)
        self._counts = deque([self._latencies()], maxlen=LATENCY_SECONDS)

    async def run(self, engine: Callable[[], EngineClient | None]) -> None:
        """Take a sample of the engine that there is every second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.take(engine())

    def take(self, engine: EngineClient | None) -> Sample:
        """Take a sample now, of the time since the last one."""
        load = Load() if engine is None else engine.load
        now = self._clock()
        last, before = self._loads[-1]
        if load.prompt_tokens < before.prompt_tokens or load.output_tokens < before.output_tokens:
            self._loads.clear()
            self._loads.append((last, Load()))  # another engine, which counts from 0
        earlier, before = self._loads[-min(RATE_SECONDS, len(self._loads))]
        seconds = max(now - earlier, 1e-6)
        first, between = self._counts[0]
        measures = self._measures
        sample = Sample(
            number=self._number + 1,
            at=time.time(),
            prompt_rate=(load.prompt_tokens - before.prompt_tokens) / seconds,
            output_rate=(load.output_tokens - before.output_tokens) / seconds,
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            kv_cached=load.pages_cached / load.pages_total if load.pages_total else 0.0,
            hit_rate=_hit_rate(self._loads[0][1], load),
            first_token_p50=measures.first_token.quantile(0.5, first),
            first_token_p95=measures.first_token.quantile(0.95, first),
            between_tokens_p50=measures.between_tokens.quantile(0.5, between),
            between_tokens_p95=measures.between_tokens.quantile(0.95, between),
        )
        self._number += 1
        self._loads.append((now, load))
        self.samples.append(sample)
        self._counts.append(self._latencies())
        return sample

    def since(self, number: int) -> list[Sample]:
        """Samples after `number`, oldest first."""
        return [sample for sample in self.samples if sample.number > number]

    def _latencies(self) -> tuple[Sequence[int], Sequence[int]]:
        return tuple(self._measures.first_token.counts), tuple(self._measures.between_tokens.counts)


def _hit_rate(before: Load, now: Load) -> float | None:
    prompt_tokens = now.prompt_tokens - before.prompt_tokens
    return (now.cached_tokens - before.cached_tokens) / prompt_tokens if prompt_tokens else None
