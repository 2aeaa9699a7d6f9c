"""What `verify` found, as data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from headrace.base.decision import Refusal
from headrace.testing.calibration import PlainError
from headrace.testing.combinations import PATHS, Configuration
from headrace.testing.comparison import ComparedSequence, OtherToken, Tolerance
from headrace.testing.deep import DeepFinding
from headrace.testing.verify_table import render


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One configuration.

    Attributes:
        paths: name -> steps that sequences took on it.
        places: output tokens compared.
        max_difference: largest difference of a logprob. mean_divergence: nats. top_agreement: share
            of the places whose likeliest token is the reference's.
        excused: tokens that differ where the reference's gap is small.
        problems: why it fails; empty when it passes.
        deep: the first layer that diverges, where it was looked for.
    """

    configuration: Configuration
    paths: dict[str, int]
    sequences: tuple[ComparedSequence, ...]
    places: int
    max_difference: float
    mean_divergence: float
    top_agreement: float
    excused: int
    problems: tuple[str, ...]
    deep: DeepFinding | None = None
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def first_other(self) -> tuple[ComparedSequence, OtherToken] | None:
        """The first token that was not the reference's, and whose."""
        for sequence in self.sequences:
            if sequence.other is not None:
                return sequence, sequence.other
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All configurations, and what was not admitted and why.

    Attributes:
        tolerance: what configurations are held to. plain: what plain eager of the same dtype is
            off by, which it follows from; `None` where it is fixed.
        possible: admitted combinations, of which `results` may be a few.
        same_bits: sequences were held to the bits that they have alone, too.
        waves: name -> prompts. environment: what it ran on, by name.
        reference_seconds: what the reference took before the first configuration, and plain eager.
    """

    model: str
    device: str
    dtype: str
    tolerance: Tolerance
    plain: PlainError | None
    same_bits: bool = False
    waves: Mapping[str, int]
    results: Sequence[Result]
    refused: Sequence[Refusal]
    possible: int
    environment: Mapping[str, str]
    seconds: float
    reference_seconds: float

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if not result.passed]

    @property
    def summary(self) -> str:
        good = len(self.results) - len(self.failed)
        return (
            f"{good} of {len(self.results)} configurations agree with the reference "
            f"({self.possible} possible), {self.seconds:.0f} s, "
            f"{self.reference_seconds:.0f} s of them for the reference"
        )

    @property
    def common(self) -> str:
        """The setting, or pair of settings, that all failing configurations have and no passing
        one; "" where there is none, or where all fail."""
        failed = [_settings(result.configuration) for result in self.failed]
        passed = [_settings(result.configuration) for result in self.results if result.passed]
        if not failed or not passed:
            return ""
        shared = sorted(set.intersection(*failed))
        for count in (1, 2):
            for chosen in combinations(shared, count):
                if not any(settings.issuperset(chosen) for settings in passed):
                    return " and ".join(chosen)
        return ""

    @property
    def bounds(self) -> str:
        """What was held, in a line."""
        bound = self.tolerance
        return (
            f"|dlogprob| <= {bound.logprob:.2g}, mean KL <= {bound.divergence:.2g} nats, "
            f"excused <= {bound.excused:.1%}"
            + (", the same bits as alone" if self.same_bits else "")
        )

    def refusals_by_reason(self) -> dict[str, list[str]]:
        """Reason (with its remedy) -> what it keeps away: "triton, fa3 on every path"."""
        found: dict[str, list[str]] = {}
        for refusal in self.refused:
            remedy = f" ({refusal.remedy})" if refusal.remedy else ""
            found.setdefault(f"{refusal.reason}{remedy}", []).append(refusal.subject)
        return {reason: _together(subjects) for reason, subjects in found.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not a number becomes `None`."""
        plain: dict[str, Any] = _plain(
            {"schema": SCHEMA, **asdict(self), "passed": self.passed, "common": self.common}
        )
        return plain

    def __str__(self) -> str:
        """The table and what failed, in lines of any length; `verify_table.render` fits them."""
        return render(self)


SCHEMA = 1  # of `as_dict`; grows when a key changes its meaning or goes


def _settings(configuration: Configuration) -> set[str]:
    """Each setting in words."""
    named = asdict(configuration)
    return {
        f"{name.replace('_', ' ')} {'on' if value is True else 'off' if value is False else value}"
        for name, value in named.items()
    }


def _together(subjects: Sequence[str]) -> list[str]:
    """Backends that are refused on the same paths in one; a path refused by itself stays."""
    paths: dict[str, list[str]] = {}
    for subject in subjects:
        path, _, backend = subject.partition(" / ")
        paths.setdefault(backend, []).append(path)
    backends: dict[tuple[str, ...], list[str]] = {}
    for backend, found in paths.items():
        backends.setdefault(tuple(found), []).append(backend)
    return [
        f"{', '.join(names)} on {'every path' if set(found) == set(PATHS) else ', '.join(found)}"
        if any(names)
        else ", ".join(found)
        for found, names in backends.items()
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
