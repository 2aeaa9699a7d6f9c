"""What `verify` found, as a table or as plain data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.base.decision import Refusal
from headrace.testing.combinations import Configuration
from headrace.testing.comparison import Tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One configuration.

    Attributes:
        paths: name -> steps that sequences took on it.
        max_difference: largest difference of a logprob. mean_divergence: nats.
        first_difference: the first token that was not the reference's, "" where all were.
        excused: tokens that differ where the reference's gap is small.
        problems: why it fails; empty when it passes.
    """

    configuration: Configuration
    paths: dict[str, int]
    sequences: int
    places: int
    max_difference: float
    mean_divergence: float
    first_difference: str
    excused: int
    problems: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All configurations, and what was not admitted and why.

    `possible` counts the admitted combinations, of which `results` may be a few.
    """

    model: str
    device: str
    dtype: str
    tolerance: Tolerance
    results: Sequence[Result]
    refused: Sequence[Refusal]
    possible: int
    seconds: float

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if not result.passed]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        bound = self.tolerance
        yield (
            f"{self.model} in {self.dtype} on {self.device} against float32 eager: "
            f"|dlogprob| <= {bound.logprob:g}, mean divergence <= {bound.divergence:g} nats, "
            f"excused <= {bound.excused:.1%}"
        )
        yield ""
        yield from table(COLUMNS, [_cells(result) for result in self.results])
        for result in self.failed:
            yield ""
            yield f"FAILED {result.configuration}"
            yield f"  paths: {_paths(result)}"
            yield from (f"  {problem}" for problem in result.problems[:SHOWN])
            if len(result.problems) > SHOWN:
                yield f"  and {len(result.problems) - SHOWN} more"
        if self.refused:
            yield ""
            yield "Not admitted"
            yield from (f"  {refusal}" for refusal in self.refused)
        yield ""
        good = len(self.results) - len(self.failed)
        yield (
            f"{good} of {len(self.results)} configurations agree with the reference "
            f"({self.possible} possible), {self.seconds:.0f} s"
        )


SHOWN = 5
COLUMNS = (
    "configuration",
    "paths (steps)",
    "sequences",
    "max |dlogprob|",
    "divergence",
    "first other token",
    "excused",
    "verdict",
)


def _cells(result: Result) -> tuple[str, ...]:
    return (
        str(result.configuration),
        _paths(result),
        str(result.sequences),
        f"{result.max_difference:.1e}",
        f"{result.mean_divergence:.1e}",
        result.first_difference or "-",
        f"{result.excused}/{result.places}",
        "ok" if result.passed else "FAILED",
    )


def _paths(result: Result) -> str:
    return ", ".join(f"{path} ({steps})" for path, steps in result.paths.items()) or "none"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Left-aligned columns with a line under their names."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for cells in (columns, ["-" * width for width in widths], *rows):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield "  ".join(padded).rstrip()
