"""Pictures of a serving benchmark (matplotlib): one run over time, or several runs as a curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from headrace.bench.plot import save
from headrace.bench.serve.run import Run
from headrace.bench.serve.summary import LATENCIES, Summary, latency_seconds, running_steps

SECTIONS = 60  # of a run's time


def draw(runs: Sequence[tuple[Run, Summary]], title: str, target: Path) -> None:
    """Draw what was measured.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    left, right = figure.subplots(1, 2)
    if len(runs) == 1:
        _over_time(left, runs[0][0])
        _shares(right, runs[0][0])
    else:
        _curve(left, runs, "tpot")
        _curve(right, runs, "ttft")
    save(figure, target)


def _over_time(panel: Any, run: Run) -> None:
    """Requests under way, and output chunks a second."""
    records = [record for record in run.records if record.state in ("done", "failed")]
    steps = running_steps(records)
    panel.step([time - run.began for time, _ in steps], [count for _, count in steps], where="post")
    panel.set_xlabel("seconds")
    panel.set_ylabel("requests under way")
    came = [
        time - run.began
        for record in records
        if record.first is not None
        for time in record.first + numpy.cumsum([0.0, *record.gaps])
    ]
    counts, edges = numpy.histogram(came, bins=SECTIONS, range=(0.0, run.seconds))
    rates = panel.twinx()
    width = run.seconds / SECTIONS
    rates.plot(edges[:-1] + width / 2, counts / width, "C1", label="output chunks/s")
    rates.set_ylim(bottom=0)
    rates.set_ylabel("output chunks/s", color="C1")


def _shares(panel: Any, run: Run) -> None:
    """Of each latency, the share of its values up to x."""
    done = [record for record in run.records if record.state == "done"]
    for name, values in latency_seconds(done).items():
        if values:
            ordered = numpy.sort(values) * 1e3
            share = numpy.arange(1, len(ordered) + 1) / len(ordered)
            panel.step(ordered, share, where="post", label=LATENCIES[name])
    _logarithmic(panel)
    panel.set_xlabel("milliseconds")
    panel.set_ylabel("share of values up to here")
    if done:
        panel.legend(fontsize="small")


def _curve(panel: Any, runs: Sequence[tuple[Run, Summary]], name: str) -> None:
    """Throughput over a latency, a point for each run."""
    points = [
        (spread, summary) for _, summary in runs if (spread := summary.latencies[name]) is not None
    ]
    throughputs = [summary.output_throughput for _, summary in points]
    for kind, style in (("median", "o-"), ("p99", "s--")):
        panel.plot([getattr(spread, kind) for spread, _ in points], throughputs, style, label=kind)
    for spread, summary in points:
        panel.annotate(
            f"{summary.mean_concurrency:.0f}",
            (spread.median, summary.output_throughput),
            textcoords="offset points",
            xytext=(4, 6),
        )
    panel.set_xlabel(f"{LATENCIES[name]}, ms (numbers: mean requests at once)")
    panel.set_ylabel("output tokens/s")
    _logarithmic(panel)
    if points:
        panel.legend()


def _logarithmic(panel: Any) -> None:
    """The axis of milliseconds, with numbers that are read at once."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
