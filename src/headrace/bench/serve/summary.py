"""What a run comes to: throughput, latencies, and what must be said beside them.

The lines of the table and the keys of the JSON have the names that vLLM and SGLang give them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from headrace.bench.serve.record import Record
from headrace.bench.serve.run import Run

WIDTH = 50
BUSY = 0.85  # of one core: beyond it the load generator may be what is measured
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
ERRORS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        if not seconds:
            return None
        values = numpy.asarray(seconds) * 1e3
        median, p90, p99 = numpy.percentile(values, (50, 90, 99)).tolist()
        return cls(mean=float(values.mean()), median=median, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run in numbers; tokens and latencies are those of the requests that succeeded.

    Attributes:
        unfinished: neither succeeded nor failed, since ctrl-c came first.
        cached_tokens: input tokens the server had in its prefix cache; `None` where it says none.
        peak_concurrency, mean_concurrency: requests under way at once.
        latencies: ttft, tpot, itl, e2el.
        good: requests within all goals of `goals` (latency -> milliseconds), where there are any.
        notes: what a reader must know beside the numbers.
        errors: the first errors of each kind, with their number.
    """

    successful: int
    failed: int
    unfinished: int
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    peak_concurrency: int
    mean_concurrency: float
    latencies: Mapping[str, Spread | None]
    goals: Mapping[str, float]
    good: int
    client_load: float
    notes: Sequence[str]
    errors: Sequence[tuple[str, int]]

    @classmethod
    def of(cls, run: Run, goals: Mapping[str, float] | None = None) -> "Summary":
        done = [record for record in run.records if record.state == "done"]
        failed = [record for record in run.records if record.state == "failed"]
        cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
        errors = Counter(record.error for record in failed)
        return cls(
            successful=len(done),
            failed=len(failed),
            unfinished=len(run.records) - len(done) - len(failed),
            seconds=run.seconds,
            input_tokens=sum(record.read or 0 for record in done),
            output_tokens=sum(record.made for record in done),
            cached_tokens=sum(cached) if cached else None,
            peak_concurrency=_peak(done + failed),
            mean_concurrency=sum(record.e2e for record in done + failed) / run.seconds,
            latencies={name: Spread.of(values) for name, values in latency_seconds(done).items()},
            goals=goals or {},
            good=sum(_is_good(record, goals or {}) for record in done),
            client_load=run.client_load,
            notes=_notes(run, done),
            errors=errors.most_common(ERRORS_SHOWN),
        )

    @property
    def request_throughput(self) -> float:
        return self.successful / self.seconds

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON lines."""
        entry: dict[str, Any] = {
            "completed": self.successful,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "duration": self.seconds,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "cached_input_tokens": self.cached_tokens,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_throughput,
            "max_concurrent_requests": self.peak_concurrency,
            "concurrency": self.mean_concurrency,
        }
        for name, spread in self.latencies.items():
            for kind in ("mean", "median", "p90", "p99"):
                entry[f"{kind}_{name}_ms"] = None if spread is None else getattr(spread, kind)
        if self.goals:
            entry["goodput_goals_ms"] = dict(self.goals)
            entry["request_goodput"] = self.good / self.seconds
        entry["client_load"] = self.client_load
        entry["notes"] = list(self.notes)
        entry["errors"] = [{"error": error, "count": count} for error, count in self.errors]
        return entry

    def table(self) -> str:
        """The table of this field, with what must be said below it."""
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        lines += [f"{name + ':':<40} {value:<9}".rstrip() for name, value in self._counts()]
        for name, title in LATENCIES.items():
            lines.append(f"{title:-^{WIDTH}}")
            spread = self.latencies[name]
            for kind in ("mean", "median", "p90", "p99"):
                value = "-" if spread is None else f"{getattr(spread, kind):.2f}"
                label = f"{kind.capitalize()} {name.upper()} (ms):"
                lines.append(f"{label:<40} {value:<9}".rstrip())
        lines.append("=" * WIDTH)
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"failed {count} times: {error}" for error, count in self.errors]
        return "\n".join(lines)

    def _counts(self) -> Iterable[tuple[str, str]]:
        yield "Successful requests", str(self.successful)
        yield "Failed requests", str(self.failed)
        if self.unfinished:
            yield "Unfinished requests", str(self.unfinished)
        yield "Benchmark duration (s)", f"{self.seconds:.2f}"
        yield "Total input tokens", str(self.input_tokens)
        if self.cached_tokens is not None:
            yield "Cached input tokens", str(self.cached_tokens)
        yield "Total generated tokens", str(self.output_tokens)
        yield "Request throughput (req/s)", f"{self.request_throughput:.2f}"
        if self.goals:
            yield "Request goodput (req/s)", f"{self.good / self.seconds:.2f}"
        yield "Output token throughput (tok/s)", f"{self.output_throughput:.2f}"
        yield "Total token throughput (tok/s)", f"{self.total_throughput:.2f}"
        yield "Peak concurrent requests", str(self.peak_concurrency)
        yield "Mean concurrent requests", f"{self.mean_concurrency:.2f}"
        yield "Load generator (share of one core)", f"{self.client_load:.2f}"


def latency_seconds(done: Sequence[Record]) -> dict[str, list[float]]:
    """The values behind each latency."""
    return {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.gaps],
        "e2el": [record.e2e for record in done],
    }


def _is_good(record: Record, goals: Mapping[str, float]) -> bool:
    found = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2e}
    return all(found[name] * 1e3 <= most for name, most in goals.items())


def running_steps(records: Iterable[Record]) -> list[tuple[float, int]]:
    """(time, requests under way from then on), in the order of time."""
    changes = [(record.sent, 1) for record in records]
    changes += [(record.ended, -1) for record in records]
    steps, running = [], 0
    for time, change in sorted(changes):  # at one moment an end counts before a start
        running += change
        steps.append((time, running))
    return steps


def _peak(records: Sequence[Record]) -> int:
    return max((running for _, running in running_steps(records)), default=0)


def _notes(run: Run, done: Sequence[Record]) -> list[str]:
    notes = []
    if run.was_interrupted:
        notes.append("interrupted; the tokens of unfinished requests are not counted")
    uncounted = sum(record.output_tokens is None for record in done)
    if uncounted:
        notes.append(
            f"{uncounted} streams had no usage: their output tokens are their chunks, "
            "of which each may hold several"
        )
    unknown = sum(record.read is None for record in done)
    if unknown:
        notes.append(f"the input tokens of {unknown} requests are unknown, and counted as 0")
    short = sum(record.made < record.output_len for record in done)
    if short:
        notes.append(f"{short} answers are shorter than asked")
    coarse = sum(record.made > 1.5 * record.chunks for record in done)
    if coarse:
        notes.append(
            f"{coarse} streams brought several tokens in a chunk: ITL is the time between chunks"
        )
    if run.client_load > BUSY:
        notes.append(
            "the load generator was busy all the time: what is measured may be its own speed"
        )
    return notes
