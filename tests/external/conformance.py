"""Tests nobody here wrote, against `headrace serve` on the CPU: one table, one exit status.

    python tests/external/conformance.py [SUITE ...] [--fast] [--show-expected]

Each suite runs in an environment of its own under build/conformance, made by pip at its first run.
Exit status 0: every suite ran, and nothing failed but what its list of expected failures names.
"""

import argparse
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / each) for each in ("engine", "serving")]

import canitoolcall_suite  # noqa: E402
import guidellm_suite  # noqa: E402
import langchain_suite  # noqa: E402
import lm_eval_suite  # noqa: E402
import openai_suite  # noqa: E402
import schemathesis_suite  # noqa: E402
from environment import Unavailable, make_environment  # noqa: E402
from suite import Suite, Verdict, Workplace, judge  # noqa: E402

SUITES = {
    module.SUITE.name: module.SUITE
    for module in (
        openai_suite,
        lm_eval_suite,
        schemathesis_suite,
        guidellm_suite,
        langchain_suite,
        canitoolcall_suite,
    )
}
MOST_SHOWN = 30
SHOWN_LETTERS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`verdict` is `None` when the suite did not come to an end; `told` says why."""

    suite: Suite
    verdict: Verdict | None
    told: list[str]
    seconds: float

    @property
    def holds(self) -> bool:
        return self.verdict is not None and not self.told


def run_suite(suite: Suite, folder: Path, *, fast: bool) -> Result:
    began = time.monotonic()
    place_folder = folder / suite.name
    place_folder.mkdir(parents=True, exist_ok=True)
    verdict, told = None, []
    try:
        environment = make_environment(place_folder / "environment", suite.requirements)
        began = time.monotonic()
        place = Workplace(environment=environment, folder=place_folder, fast=fast)
        verdict = judge(suite, suite.run(place), fast=fast)
        told = verdict.complaints
    except Unavailable as error:
        told = [f"not run, something could not be fetched: {error}"]
    except Exception:
        told = [f"the suite broke off:\n{traceback.format_exc()}"]
    return Result(suite=suite, verdict=verdict, told=told, seconds=time.monotonic() - began)


def show(result: Result, *, show_expected: bool) -> None:
    """Everything but the row of the table."""
    suite, verdict = result.suite, result.verdict
    print(f"\n== {suite.name}: {suite.what}")
    for part, reason in suite.left_out.items():
        print(f"   left out: {part}: {reason}")
    if verdict is not None and show_expected:
        for case, reason in verdict.expected:
            print(f"   expected: {case.name}: {reason}")
    for told in result.told[:MOST_SHOWN]:
        print(f"   FAILED: {told[:SHOWN_LETTERS]}")
    if len(result.told) > MOST_SHOWN:
        print(f"   and {len(result.told) - MOST_SHOWN} more")


def table(results: list[Result]) -> str:
    titles = ("suite", "passed", "expected", "unexpected", "skipped", "seconds", "holds")
    rows = [titles]
    for result in results:
        verdict = result.verdict
        counts = ("-", "-", "-", "-")
        if verdict is not None:
            share = f"{len(verdict.expected)} ({len(verdict.expected) / max(1, verdict.ran):.1%})"
            unexpected, skipped = str(len(verdict.unexpected)), str(verdict.skipped)
            counts = (str(verdict.passed), share, unexpected, skipped)
        holds = "yes" if result.holds else "NO" if verdict is not None else "NOT RUN"
        rows.append((result.suite.name, *counts, f"{result.seconds:.0f}", holds))
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--fast", action="store_true", help="fewer examples")
    parser.add_argument("--show-expected", action="store_true", help="list expected failures too")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "conformance")
    asked = parser.parse_args()
    unknown = [each for each in asked.suites if each not in SUITES]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    results = []
    for name in asked.suites or SUITES:
        results.append(run_suite(SUITES[name], asked.folder.resolve(), fast=asked.fast))
        show(results[-1], show_expected=asked.show_expected)
        sys.stdout.flush()
    print(f"\n{table(results)}\n\nlogs: {asked.folder}")
    return int(not all(result.holds for result in results))


if __name__ == "__main__":
    sys.exit(main())
