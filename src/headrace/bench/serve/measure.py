"""From what was asked to what was measured: warm-up, then a run for each pace."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from headrace.base.errors import UnavailableError
from headrace.bench.serve.client import Client, Target, ask_json, check_jobs, connect
from headrace.bench.serve.record import Record
from headrace.bench.serve.run import Pace, Run, send_all
from headrace.bench.serve.work import WARM_UP, ServeLoad

OnEnd = Callable[[Record], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is measured in one go.

    Attributes:
        paces: a run for each. warm_up: requests before the first run, which are not measured.
        flush_cache: have the server forget its prefix cache before each run.
    """

    target: Target
    load: ServeLoad
    paces: Sequence[Pace]
    warm_up: int = 1
    flush_cache: bool = False


async def measure(plan: Plan, *, on_run: Callable[[Pace, Run], None], show_progress: bool) -> None:
    """Run every pace; the first that is interrupted is the last.

    Args:
        on_run: called with what each run saw.

    Raises:
        ConfigError: a prompt does not go with the endpoint.
        UnavailableError: a warm-up request fails, or the cache cannot be flushed.
    """
    check_jobs(plan.target, plan.load.jobs(WARM_UP))
    async with connect(plan.target) as client:
        await _warm_up(client, plan)
        for number, pace in enumerate(plan.paces):
            if plan.flush_cache:
                await _flush(plan.target)
            jobs = plan.load.jobs(number)
            with _progress(len(jobs), show_progress) as on_end:
                run = await send_all(client, plan.target, jobs, pace, on_end)
            on_run(pace, run)
            if run.was_interrupted:
                return


async def _warm_up(client: Client, plan: Plan) -> None:
    """Also what finds a wrong address, key or model before a thousand requests fail for it."""
    jobs = plan.load.jobs(WARM_UP)[: plan.warm_up]
    if not jobs:
        return
    run = await send_all(
        client, plan.target, jobs, replace(plan.paces[0], request_rate=float("inf"))
    )
    for record in run.records:
        if record.state == "failed":
            raise UnavailableError(
                "A warm-up request failed",
                why=record.error,
                remedy="Nothing was measured; --warm-up 0 measures all the same",
            )
    if run.was_interrupted:
        raise KeyboardInterrupt


async def _flush(target: Target) -> None:
    answer = await ask_json(target.base_url, "/flush_cache", target.api_key, post=True)
    if answer is None:
        raise UnavailableError(
            f"{target.base_url} has no /flush_cache",
            remedy="Leave --flush-cache out: each run has prompts of its own",
        )


@contextmanager
def _progress(total: int, show: bool) -> Iterator[OnEnd]:
    from tqdm import tqdm

    with tqdm(total=total, disable=not show, unit=" requests", leave=False) as bar:

        def on_end(_record: Record) -> None:
            bar.update()

        yield on_end


def details(run: Run) -> dict[str, Any]:
    """What was seen of each request, as columns, for JSON."""
    records = run.records
    return {
        "input_lens": [record.read for record in records],
        "output_lens": [record.made for record in records],
        "start_times": [
            None if record.state == "waiting" else record.sent - run.began for record in records
        ],
        "ttfts": [record.ttft if record.first is not None else None for record in records],
        "e2els": [record.e2e if record.state == "done" else None for record in records],
        "itls": [record.gaps for record in records],
        "request_errors": [record.error for record in records],
    }
