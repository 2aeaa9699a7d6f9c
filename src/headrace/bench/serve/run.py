"""One run: requests sent at their times, at most so many at once."""

import asyncio
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from headrace.bench.serve.arrivals import arrivals
from headrace.bench.serve.client import Client, Target
from headrace.bench.serve.record import Record
from headrace.bench.serve.work import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How requests are sent.

    Attributes:
        request_rate: mean requests a second (Poisson); infinite: all at once.
        max_concurrency: so many at once at most; the others wait here and their clock does not run.
    """

    request_rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        rate = "all at once"
        if not math.isinf(self.request_rate):
            rate = f"{self.request_rate:g} requests/s"
        most = "" if self.max_concurrency is None else f", at most {self.max_concurrency} running"
        return rate + most


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was seen.

    Attributes:
        began: when the first request was due, on the clock of the records. seconds: until the last
            ended, or until ctrl-c.
        client_load: share of one core that the load generator itself took.
        was_interrupted: ctrl-c ended it; requests may be unfinished.
    """

    records: Sequence[Record]
    began: float
    seconds: float
    client_load: float
    was_interrupted: bool


async def send_all(
    client: Client,
    target: Target,
    jobs: Sequence[Job],
    pace: Pace,
    on_end: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Send every job; ctrl-c (a cancellation) ends the run early.

    Args:
        on_end: called with each request that ended.
    """
    bodies = [target.body(job) for job in jobs]  # before the clock runs
    records = [Record(input_len=job.input_len, output_len=job.output_len) for job in jobs]
    times = arrivals(len(jobs), pace.request_rate, pace.seed)
    limit = asyncio.Semaphore(pace.max_concurrency or max(len(jobs), 1))

    async def send(body: bytes, record: Record) -> None:
        async with limit:
            await client.send(body, record)
        on_end(record)

    tasks: list[asyncio.Task[None]] = []
    gc.collect()
    gc.freeze()  # what stands now is not looked through while requests run
    began, worked, was_interrupted = perf_counter(), process_time(), False
    try:
        for body, record, due in zip(bodies, records, times, strict=True):
            early = began + due - perf_counter()
            if early > 0:
                await asyncio.sleep(early)
            tasks.append(asyncio.create_task(send(body, record)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        was_interrupted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        gc.unfreeze()
    seconds = perf_counter() - began
    return Run(
        records=records,
        began=began,
        seconds=seconds,
        client_load=(process_time() - worked) / seconds,
        was_interrupted=was_interrupted,
    )
