"""Outputs of a configuration against the reference: differences, excuses, a verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from headrace.engine.outputs import RequestOutput
from headrace.request.outcome import Logprob
from headrace.testing.reference import Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a configuration may be from float32 eager.

    Attributes:
        logprob: of every compared logprob, and of a logit where tokens are excused.
        divergence: mean over the places of the Kullback-Leibler divergence in nats, taken over the
            compared tokens and the rest as one.
        excused: share of the places whose token may differ for a small gap.
    """

    logprob: float
    divergence: float
    excused: float


FLOAT32_EXCUSED = 0.005
# In half precision a logit is off by some hundredths to tenths, by model and context. Logprobs are
# bounded loosely; what finds a fault is the mean divergence and how many tokens agree. Measured in
# bfloat16: SmolLM2-135M on a CPU 0.49 and 6e-4, tiny random models on an H200 0.05 and 7e-6.
HALF = {
    "bfloat16": Tolerance(logprob=0.8, divergence=0.0015, excused=0.15),
    "float16": Tolerance(logprob=0.1, divergence=0.002, excused=0.05),
}


def tolerance_of(dtype: str, device: str) -> Tolerance:
    """The bound for a dtype on a device."""
    if dtype in HALF:
        return HALF[dtype]
    logprob = 2e-4 if device == "cpu" else 1e-3
    return Tolerance(logprob=logprob, divergence=logprob, excused=FLOAT32_EXCUSED)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the comparison of one configuration found so far.

    Attributes:
        first_difference: the first token that was not the reference's: "wave prompt:place".
        problems: what is wrong, the first of each sequence.
    """

    tolerance: Tolerance
    sequences: int = 0
    places: int = 0
    excused: int = 0
    max_difference: float = 0.0
    divergence_sum: float = 0.0
    first_difference: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def mean_divergence(self) -> float:
        return self.divergence_sum / self.places if self.places else 0.0

    def verdict(self) -> list[str]:
        """Every reason why the configuration fails; empty when it passes."""
        found = list(self.problems)
        if self.mean_divergence > self.tolerance.divergence:
            found.append(
                f"mean divergence {self.mean_divergence:.2g} nats, "
                f"above {self.tolerance.divergence:g}"
            )
        if self.excused > self.tolerance.excused * self.places:
            found.append(
                f"{self.excused} of {self.places} tokens excused, "
                f"more than {self.tolerance.excused:.1%}"
            )
        return found

    def add(self, name: str, ours: RequestOutput, scored: Scored) -> None:
        """Compare one sequence; `name` says which in what is reported."""
        self.sequences += 1
        problem = self._compare(name, ours, scored)
        if problem:
            self.problems.append(f"{name}: {problem}")

    def _compare(self, name: str, ours: RequestOutput, scored: Scored) -> str:
        output = ours.outputs[0]
        if output.finish_reason != "length":
            return f"ended with {output.finish_reason} {output.message}".strip()
        assert output.logprobs is not None, "every request asks for logprobs"
        if len(output.token_ids) != len(scored.picks):
            return f"{len(output.token_ids)} tokens instead of {len(scored.picks)}"
        problem = self._prompt(ours, scored)
        for place, (token, entries) in enumerate(
            zip(output.token_ids, output.logprobs, strict=True)
        ):
            found = self._place(name, place, token, entries, scored)
            problem = problem or found
        return problem

    def _prompt(self, ours: RequestOutput, scored: Scored) -> str:
        ours_listed, theirs_listed = ours.prompt_logprobs or [], scored.prompt_logprobs or []
        if len(ours_listed) != len(theirs_listed):
            return f"{len(ours_listed)} prompt logprobs instead of {len(theirs_listed)}"
        for place, (entry, other) in enumerate(zip(ours_listed, theirs_listed, strict=True)):
            if entry is None or other is None:
                if entry is not other:
                    return f"prompt logprob {place} is missing on one side"
                continue
            # The likeliest tokens may change places at a small gap; the prompt's own is in both.
            shared = entry.keys() & other.keys()
            difference = max(abs(entry[key].logprob - other[key].logprob) for key in shared)
            if self._is_far(difference):
                return f"prompt logprob {place} differs by {difference:.2g}"
        return ""

    def _place(
        self, name: str, place: int, token: int, entries: Mapping[int, Logprob], scored: Scored
    ) -> str:
        self.places += 1
        theirs = scored.logprobs[place]
        difference = max(abs(entry.logprob - float(theirs[key])) for key, entry in entries.items())
        self.divergence_sum += divergence(entries, theirs)
        problem = ""
        if self._is_far(difference):
            problem = f"token {place}: logprob differs by {difference:.2g}"
        pick = scored.picks[place]
        if token == pick:
            return problem
        self.first_difference = self.first_difference or f"{name}, token {place}"
        if scored.excused[place]:
            self.excused += 1
            return problem
        return f"token {place} is {token} instead of {pick}" + (problem and f", {problem}")

    def _is_far(self, difference: float) -> bool:
        """Not a number counts as far."""
        if not difference <= self.max_difference:
            self.max_difference = difference
        return not difference <= self.tolerance.logprob


def divergence(ours: Mapping[int, Logprob], theirs: Tensor) -> float:
    """Kullback-Leibler divergence of ours from theirs [V], nats: the listed tokens, then the rest
    as one. A lower bound of the whole one."""
    total, ours_left, theirs_left = 0.0, 1.0, 1.0
    for token, entry in ours.items():
        log_p, log_q = float(theirs[token]), entry.logprob
        total += math.exp(log_p) * (log_p - log_q)
        theirs_left -= math.exp(log_p)
        ours_left -= math.exp(log_q)
    if theirs_left > 1e-6 and ours_left > 1e-6:
        total += theirs_left * math.log(theirs_left / ours_left)
    return total
