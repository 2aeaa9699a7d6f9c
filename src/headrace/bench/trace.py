"""Where a GPU waits for the host: the idle time between two steps, read from a profiler's trace."""

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.decoding import Decoding

TURN = "headrace turn"
WARM_TURNS = 3  # the profiler's own start disturbs the first ones
Event = Mapping[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """What a trace says of steady decode.

    Attributes:
        gaps: microseconds in which no kernel ran, between a step's last and the next one's first.
        calls: how often a turn allocated device memory, copied from pageable memory, or waited,
            by the name in the trace.
    """

    turns: int
    gaps: tuple[float, ...]
    calls: Mapping[str, int]

    @property
    def gap(self) -> float | None:
        """Median, microseconds; `None` where the profiler saw no kernel."""
        return median(self.gaps) if self.gaps else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "turns": self.turns,
            "gap_us": self.gap,
            "longest_gap_us": max(self.gaps, default=None),
            "calls": dict(self.calls),
        }


def trace_turns(decoding: Decoding, turns: int) -> TraceReport:
    """Profile turns of a batch that decodes on a GPU; takes `turns` + `WARM_TURNS` of them."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(WARM_TURNS + turns):
            with record_function(TURN):
                decoding.turn()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return read_trace(events, skip=WARM_TURNS)


def read_trace(events: Sequence[Event], *, skip: int = 0) -> TraceReport:
    """Gaps and calls of the turns in a Chrome trace, the first `skip` left out.

    A step's kernels are those of the graph that its turn launched, or all that its turn launched
    where there was no graph. Times are microseconds.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    turns = sorted(
        _span(event)
        for event in whole
        if event.get("cat") == "user_annotation" and event["name"] == TURN
    )[skip:]
    calls = [event for event in whole if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    kernels = [event for event in whole if event.get("cat") == "kernel"]
    return TraceReport(
        turns=len(turns),
        gaps=tuple(_gaps(turns, calls, kernels)),
        calls=Counter(_noted(turns, whole)),
    )


def _gaps(
    turns: Sequence[Span], calls: Sequence[Event], kernels: Sequence[Event]
) -> Iterator[float]:
    bodies = _bodies(turns, calls, kernels)
    busy = sorted(map(_span, kernels))
    for (_, stop), (start, _) in pairwise(bodies):
        yield _idle(stop, start, busy)


def _bodies(turns: Sequence[Span], calls: Sequence[Event], kernels: Sequence[Event]) -> list[Span]:
    """First start and last end of the kernels of each step, in order."""
    turn_of: dict[int, int] = {}
    graphs: set[int] = set()
    for call in calls:
        turn, correlation = _turn_at(turns, call["ts"]), _correlation(call)
        if turn is not None and correlation is not None:
            turn_of[correlation] = turn
            if "GraphLaunch" in call["name"]:
                graphs.add(correlation)
    with_graph = {turn_of[correlation] for correlation in graphs}
    spans: dict[int, list[Span]] = {}
    for kernel in kernels:
        correlation = _correlation(kernel)
        if correlation is None or correlation not in turn_of:
            continue  # launched before the first turn
        turn = turn_of[correlation]
        if turn not in with_graph or correlation in graphs:
            spans.setdefault(turn, []).append(_span(kernel))
    return [
        (min(start for start, _ in found), max(stop for _, stop in found))
        for _, found in sorted(spans.items())
    ]


def _idle(start: float, stop: float, busy: Sequence[Span]) -> float:
    """Microseconds of [start, stop) in which none of the spans lasts; 0 where they overlap."""
    idle, reached = 0.0, start
    for begin, end in busy:
        if end <= reached or begin >= stop:
            continue
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return idle + max(0.0, stop - reached)


def _noted(turns: Sequence[Span], events: Sequence[Event]) -> Iterator[str]:
    for event in events:
        name = str(event["name"])
        category = event.get("cat")
        called = category in ("cuda_runtime", "cuda_driver") and (
            "Malloc" in name or "MemAlloc" in name or "Synchronize" in name
        )
        copied = category == "gpu_memcpy" and "Pageable" in name
        if (called or copied) and _turn_at(turns, event["ts"]) is not None:
            yield name


def _turn_at(turns: Sequence[Span], moment: float) -> int | None:
    place = bisect_right(turns, (moment, float("inf"))) - 1
    return place if place >= 0 and moment < turns[place][1] else None


def _correlation(event: Event) -> int | None:
    value: int | None = None
    with suppress(KeyError):
        value = event["args"]["correlation"]
    return value


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]
