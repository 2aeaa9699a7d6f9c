"""The steps that a batch of requests would take, as objects, text and plain data."""

from dataclasses import dataclass
from typing import Any

from headrace.base.decision import Refusal
from headrace.base.errors import RequestError
from headrace.base.shown import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeseenSteps:
    """Steps of one kind that follow each other on one path.

    Attributes:
        kind: extend, decode or mixed. steps: how many.
        sequences, tokens: of a step, the fewest and the most.
        path: which runs them. prepares: it captures or compiles for them first.
        refused: better paths, and why not.
    """

    kind: str
    steps: int
    sequences: tuple[int, int]
    tokens: tuple[int, int]
    path: str
    prepares: bool
    refused: tuple[Refusal, ...]

    def __str__(self) -> str:
        first = " (made ready first)" if self.prepares else ""
        return (
            f"{_range((self.steps, self.steps), f'{self.kind} step')} of "
            f"{_range(self.sequences, 'sequence')}, {_range(self.tokens, 'token')}: "
            f"{self.path}{first}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchExplanation:
    """The steps of a batch of requests.

    Attributes:
        complete: false where only the first steps are told. paths: names of all that there are.
    """

    steps: tuple[ForeseenSteps, ...]
    complete: bool
    paths: tuple[str, ...]

    def why_not(self, path: str) -> dict[str, int]:
        """Reason -> steps that a path would not take for it; empty where it refuses none.

        Raises:
            RequestError: there is no such path.
        """
        refused = {refusal.subject for each in self.steps for refusal in each.refused}
        known = sorted({*self.paths, *refused})
        if not isinstance(path, str) or path not in known:
            raise RequestError(f"There is no path {shown(path)}", remedy=f"Use {', '.join(known)}")
        reasons: dict[str, int] = {}
        for each in self.steps:
            for refusal in each.refused:
                if refusal.subject == path:
                    reasons[refusal.reason] = reasons.get(refusal.reason, 0) + each.steps
        return reasons

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return {
            "complete": self.complete,
            "steps": [
                {
                    "kind": each.kind,
                    "steps": each.steps,
                    "sequences": list(each.sequences),
                    "tokens": list(each.tokens),
                    "path": each.path,
                    "prepares": each.prepares,
                    "refused": [
                        {"path": no.subject, "reason": no.reason, "remedy": no.remedy}
                        for no in each.refused
                    ],
                }
                for each in self.steps
            ],
        }

    def __str__(self) -> str:
        """Steps in their order; what every step refuses is told once, at the end."""
        always = set.intersection(*(set(each.refused) for each in self.steps))
        lines: list[str] = []
        for each in self.steps:
            lines.append(str(each))
            lines += [f"  not {refusal}" for refusal in each.refused if refusal not in always]
        if not self.complete:
            told_steps = sum(each.steps for each in self.steps)
            lines.append(f"and more: these are the first {told_steps:,}")
        told = [refusal for refusal in self.steps[0].refused if refusal in always]
        return "\n".join((*lines, *(f"no step: {refusal}" for refusal in told)))


def _range(bounds: tuple[int, int], noun: str) -> str:
    """1 token; 4 to 8 sequences."""
    least, most = bounds
    count = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{count} {noun}{'' if most == 1 else 's'}"
