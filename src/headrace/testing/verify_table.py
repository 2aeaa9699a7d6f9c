"""The report of `verify` as text: a table that fits its terminal, and what failed."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headrace.base.layout import hanging, table

if TYPE_CHECKING:
    from headrace.testing.verify_report import Result, VerifyReport

SHOWN = 5  # problems of a configuration
NUMBERS = ("page", "chunk", "|dlogprob|", "mean KL", "top-1", "excused", "seconds")
# Told once above the table where they are the same in every row.
SHARED = ("path", "attention", "page", "chunk", "cache", "with", "top-1", "excused")
# What a narrow table goes without, in this order.
LEFT_OUT = ("first other token", "steps by path", "seconds", "excused", "top-1", "mean KL")

Columns = dict[str, list[str]]


def render(report: "VerifyReport", width: int | None = None) -> str:
    """The whole report.

    Args:
        width: columns of the terminal; `None`: nothing is left out, and lines are of any length.
    """
    return "\n".join(_lines(report, width))


def paths_text(result: "Result") -> str:
    """eager (168), cpu_graph (30)"""
    return ", ".join(f"{path} ({steps})" for path, steps in result.paths.items()) or "none"


def _lines(report: "VerifyReport", width: int | None) -> Iterator[str]:
    yield from _told(
        f"{report.model} in {report.dtype} on {report.device} against float32 eager: "
        f"{report.bounds}",
        width,
    )
    if plain := report.plain:
        yield from _told(
            f"Plain {report.dtype} eager is off by {plain.logprob:.2g}, "
            f"{plain.divergence:.2g} nats, {plain.other_tokens:.1%} other tokens",
            width,
        )
    yield ""
    yield from _table_lines(report, width)
    if report.common:
        yield ""
        yield from _told(f"What fails has {report.common}; nothing that passes does", width)
    for result in report.failed:
        yield ""
        yield from _told(f"FAILED {result.configuration}", width)
        for line in _failure(result):
            yield from _told(line, width, indent=2)
    if report.refused:
        yield ""
        yield "Not admitted"
        for reason, subjects in report.refusals_by_reason().items():
            yield from _told(f"{'; '.join(subjects)}: {reason}", width, indent=2)
    yield ""
    yield from _told(report.summary, width)


def _told(text: str, width: int | None, *, indent: int = 0) -> list[str]:
    head = " " * indent
    if width is None:
        return [head + text]
    return hanging(text, head=head, indent=indent + 4, width=width)


def _table_lines(report: "VerifyReport", width: int | None) -> Iterator[str]:
    columns = {name: [cell(each) for each in report.results] for name, cell in CELLS.items()}
    shared = {
        name: columns.pop(name)[0]
        for name in SHARED
        if len(report.results) > 1 and len(set(columns[name])) == 1
    }
    if set(columns["first other token"]) <= {"-"}:
        del columns["first other token"]
    for name in LEFT_OUT:
        if width is not None and max(map(len, _grid(columns))) > width:
            columns.pop(name, None)
    if shared:
        values = ", ".join(f"{name} {value}" for name, value in shared.items())
        yield from _told(f"All: {values}", width)
        yield ""
    yield from _grid(columns)


def _grid(columns: Columns) -> Iterator[str]:
    return table(list(columns), list(zip(*columns.values(), strict=True)), numbers=NUMBERS)


def _failure(result: "Result") -> Iterator[str]:
    yield f"paths: {paths_text(result)}"
    yield from result.problems[:SHOWN]
    if len(result.problems) > SHOWN:
        yield f"and {len(result.problems) - SHOWN} more"
    if (other := result.first_other) is not None:
        yield f"first other token: {other[0].name}, {other[1]}"
    if result.deep is not None:
        yield f"first divergence: {result.deep}"


def _with(result: "Result") -> str:
    configuration = result.configuration
    if configuration.overlap and configuration.retraction:
        return "both"
    if configuration.overlap:
        return "overlap"
    return "retraction" if configuration.retraction else "-"


def _other(result: "Result") -> str:
    other = result.first_other
    return "-" if other is None else f"{other[0].name}, token {other[1].place}"


CELLS: dict[str, Callable[["Result"], str]] = {
    "verdict": lambda result: "ok" if result.passed else "FAILED",
    "path": lambda result: result.configuration.path,
    "attention": lambda result: result.configuration.attention,
    "page": lambda result: str(result.configuration.page_size),
    "chunk": lambda result: str(result.configuration.chunk),
    "cache": lambda result: result.configuration.cache,
    "with": _with,
    "|dlogprob|": lambda result: f"{result.max_difference:.1e}",
    "mean KL": lambda result: f"{result.mean_divergence:.1e}",
    "top-1": lambda result: f"{result.top_agreement:.1%}",
    "excused": lambda result: f"{result.excused}/{result.places}",
    "seconds": lambda result: f"{result.seconds:.1f}",
    "first other token": _other,
    "steps by path": paths_text,
}
