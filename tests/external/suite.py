"""What a suite of other people's tests is: how it is run, and how its outcome is judged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

from environment import Environment

MOST_EXPECTED_FAILURES = 0.05  # of the cases that ran


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a suite. `detail` is its complaint, or why it was skipped."""

    name: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What a suite gets to work with.

    Attributes:
        environment: a virtual environment of its own with `Suite.requirements`.
        folder: its folder under build/; checkpoint, logs and reports lie there.
        fast: fewer examples.
    """

    environment: Environment
    folder: Path
    fast: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tests nobody here wrote.

    Attributes:
        requirements: what pip installs into its environment, versions fixed.
        run: starts a server and runs the suite; returns every case.
        expected_failures: pattern of case names (fnmatch) -> why it is out of scope.
        left_out: what of the suite is not run at all -> why.
    """

    name: str
    what: str
    requirements: Sequence[str]
    run: Callable[[Workplace], list[Case]]
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A suite's cases against its list of expected failures."""

    passed: int
    skipped: int
    expected: Sequence[tuple[Case, str]]
    unexpected: Sequence[Case]
    stale: Sequence[str]  # patterns that match no failure

    @property
    def ran(self) -> int:
        return self.passed + len(self.expected) + len(self.unexpected)

    @property
    def complaints(self) -> list[str]:
        """Why the suite does not hold; empty if it does."""
        told = [f"{case.name}: {case.detail}" for case in self.unexpected]
        told += [f"expected to fail, but nothing failed: {pattern}" for pattern in self.stale]
        if not self.passed:
            told.append("no case passed")
        if len(self.expected) > MOST_EXPECTED_FAILURES * self.ran:
            told.append(f"{len(self.expected)} expected failures of {self.ran} are too many")
        return told


def judge(suite: Suite, cases: Iterable[Case], *, fast: bool) -> Verdict:
    """`fast` runs may leave out the cases that are expected to fail."""
    passed = skipped = 0
    expected: list[tuple[Case, str]] = []
    unexpected: list[Case] = []
    used: set[str] = set()
    for case in cases:
        if case.outcome is not Outcome.FAILED:
            passed += case.outcome is Outcome.PASSED
            skipped += case.outcome is Outcome.SKIPPED
            continue
        patterns = [each for each in suite.expected_failures if fnmatchcase(case.name, each)]
        if patterns:
            used.update(patterns)
            expected.append((case, suite.expected_failures[patterns[0]]))
        else:
            unexpected.append(case)
    stale = [] if fast else [each for each in suite.expected_failures if each not in used]
    return Verdict(
        passed=passed, skipped=skipped, expected=expected, unexpected=unexpected, stale=stale
    )


def cases_of_junit(path: Path) -> list[Case]:
    """The cases of a JUnit report, named module.Class.test[parameters], or by their name alone."""
    cases = []
    for element in ElementTree.parse(path).iter("testcase"):
        owner = element.get("classname", "").rpartition("tests.")[2].lstrip(".")
        name = ".".join(part for part in (owner, element.get("name", "")) if part)
        outcome, detail = Outcome.PASSED, ""
        for child in element:
            if child.tag in ("failure", "error"):
                outcome = Outcome.FAILED
            elif child.tag == "skipped":
                outcome = Outcome.SKIPPED
            else:
                continue
            detail = child.get("message") or (child.text or "").strip()
        cases.append(Case(name=name, outcome=outcome, detail=detail))
    return cases
