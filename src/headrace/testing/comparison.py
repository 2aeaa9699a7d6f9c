"""Outputs of a configuration against the reference: differences, excuses, a verdict."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headrace.engine.outputs import RequestOutput
from headrace.request.outcome import Logprob
from headrace.testing.reference import Scored

Decode = Callable[[Sequence[int]], str]

CONTEXT = 12  # tokens shown before one that differs


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
# In half precision a logit is off by some hundredths to tenths, by model and context. These bounds
# are loose: they hold where plain eager itself is far off. What is usual follows from how far plain
# eager of the same dtype is (`calibration.py`); in bfloat16 on a CPU by 0.46 and 6e-4 nats with
# SmolLM2-135M, by 1.1 and 2e-3 with Gemma-3-270M, by 0.05 and 7e-6 with tiny random models.
HALF = {
    "bfloat16": Tolerance(logprob=2.5, divergence=0.01, excused=0.2),
    "float16": Tolerance(logprob=0.3, divergence=0.002, excused=0.05),
}


def tolerance_of(dtype: str, device: str) -> Tolerance:
    """The bound for a dtype on a device, before it is calibrated."""
    if dtype in HALF:
        return HALF[dtype]
    logprob = 2e-4 if device == "cpu" else 1e-3
    return Tolerance(logprob=logprob, divergence=logprob, excused=FLOAT32_EXCUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherToken:
    """A token that was not the reference's.

    Attributes:
        place: of the output, from 0. context: tokens before it, the last ones.
        excused: a change of the logits within the tolerance explains it.
        context_text, token_text, expected_text: "" without a tokenizer.
    """

    place: int
    token: int
    expected: int
    excused: bool
    context: tuple[int, ...]
    context_text: str = ""
    token_text: str = ""
    expected_text: str = ""

    def __str__(self) -> str:
        excused = " (excused)" if self.excused else ""
        if not (self.token_text or self.expected_text):
            return f"token {self.place}: {self.token} instead of {self.expected}{excused}"
        return (
            f"token {self.place}: {self.token_text!r} instead of {self.expected_text!r}{excused}, "
            f"after {self.context_text!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSequence:
    """One sequence of a configuration.

    Attributes:
        differences: largest difference of a logprob, by place of the output; empty where nothing
            could be compared.
        problem: why it fails, "" where it does not.
    """

    wave: str
    index: int
    prompt_tokens: int
    differences: tuple[float, ...]
    other: OtherToken | None
    problem: str

    @property
    def name(self) -> str:
        return f"{self.wave} prompt {self.index}"

    @property
    def largest(self) -> float:
        return worst(self.differences)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the comparison of one configuration found so far.

    Attributes:
        decode: text of tokens, where there is a tokenizer.
        top_agreed: places whose likeliest token is the reference's.
        max_difference: prompts that were scored included.
    """

    tolerance: Tolerance
    decode: Decode | None = None
    sequences: list[ComparedSequence] = field(default_factory=list)
    places: int = 0
    excused: int = 0
    top_agreed: int = 0
    max_difference: float = 0.0
    divergence_sum: float = 0.0

    @property
    def mean_divergence(self) -> float:
        return self.divergence_sum / self.places if self.places else 0.0

    @property
    def top_agreement(self) -> float:
        """Share of the places."""
        return self.top_agreed / self.places if self.places else 1.0

    def verdict(self) -> list[str]:
        """Every reason why the configuration fails; empty when it passes."""
        found = [f"{each.name}: {each.problem}" for each in self.sequences if each.problem]
        if not self.mean_divergence <= self.tolerance.divergence:
            found.append(
                f"mean divergence {self.mean_divergence:.2g} nats, "
                f"above {self.tolerance.divergence:.2g}"
            )
        if self.excused > self.tolerance.excused * self.places:
            found.append(
                f"{self.excused} of {self.places} tokens excused, "
                f"more than {self.tolerance.excused:.1%}"
            )
        return found

    def add(self, wave: str, index: int, ours: RequestOutput, scored: Scored) -> None:
        """Compare one sequence, of prompt `index` of a wave."""
        compared = _Comparison(self.tolerance)
        problem = compared.problem_of(ours, scored)
        self.places += len(compared.differences)
        self.excused += compared.excused
        self.top_agreed += compared.top_agreed
        self.divergence_sum += compared.divergence_sum
        self.max_difference = worst((self.max_difference, compared.max_difference))
        self.sequences.append(
            ComparedSequence(
                wave=wave,
                index=index,
                prompt_tokens=len(ours.prompt_token_ids),
                differences=tuple(compared.differences),
                other=self._other(ours, scored, compared.first_other),
                problem=problem,
            )
        )

    def _other(self, ours: RequestOutput, scored: Scored, place: int | None) -> OtherToken | None:
        if place is None:
            return None
        output = ours.outputs[0].token_ids
        context = [*ours.prompt_token_ids, *output[:place]][-CONTEXT:]
        token, expected = output[place], scored.picks[place]
        texts = {}
        if self.decode is not None:
            texts = {
                "context_text": self.decode(context),
                "token_text": self.decode([token]),
                "expected_text": self.decode([expected]),
            }
        return OtherToken(
            place=place,
            token=token,
            expected=expected,
            excused=scored.excused[place],
            context=tuple(context),
            **texts,
        )


class _Comparison:
    """Of one sequence."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.differences: list[float] = []
        self.excused = self.top_agreed = 0
        self.max_difference = self.divergence_sum = 0.0
        self.first_other: int | None = None

    def problem_of(self, ours: RequestOutput, scored: Scored) -> str:
        """What is wrong first; "" when nothing is."""
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
            found = self._place(place, token, entries, scored)
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
            difference = worst(abs(entry[key].logprob - other[key].logprob) for key in shared)
            if self._is_far(difference):
                return f"prompt logprob {place} differs by {difference:.2g}"
        return ""

    def _place(self, place: int, token: int, entries: Mapping[int, Logprob], scored: Scored) -> str:
        ours = {key: entry.logprob for key, entry in entries.items()}
        error = place_error(ours, scored.logprobs[place])
        self.differences.append(error.difference)
        self.divergence_sum += error.divergence
        self.top_agreed += error.top_agrees
        problem = ""
        if self._is_far(error.difference):
            problem = f"token {place}: logprob differs by {error.difference:.2g}"
        pick = scored.picks[place]
        if token == pick:
            return problem
        if self.first_other is None:
            self.first_other = place
        if scored.excused[place]:
            self.excused += 1
            return problem
        return f"token {place} is {token} instead of {pick}" + (problem and f", {problem}")

    def _is_far(self, difference: float) -> bool:
        self.max_difference = worst((self.max_difference, difference))
        return not difference <= self.tolerance.logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceError:
    """One place: largest difference of a logprob, divergence in nats, whether the likeliest token
    is the same."""

    difference: float
    divergence: float
    top_agrees: bool


def place_error(ours: Mapping[int, float], theirs: Tensor) -> PlaceError:
    """Logprobs of some tokens, the likeliest among them, against the reference's [V]."""
    wanted = {key: float(theirs[key]) for key in ours}
    return PlaceError(
        difference=worst(abs(value - wanted[key]) for key, value in ours.items()),
        divergence=divergence(ours, wanted),
        top_agrees=min(ours, key=lambda key: (-ours[key], key)) == int(theirs.argmax()),
    )


def divergence(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Kullback-Leibler divergence of ours from theirs, nats: the listed tokens, then the rest as
    one. A lower bound of the whole one."""
    total, ours_left, theirs_left = 0.0, 1.0, 1.0
    for token, log_q in ours.items():
        log_p = theirs[token]
        total += math.exp(log_p) * (log_p - log_q)
        theirs_left -= math.exp(log_p)
        ours_left -= math.exp(log_q)
    if theirs_left > 1e-6 and ours_left > 1e-6:
        total += theirs_left * math.log(theirs_left / ours_left)
    return total


def worst(values: Iterable[float]) -> float:
    """The largest; what is not a number is larger than all."""
    largest = 0.0
    for value in values:
        if not value <= largest:
            largest = value
        if math.isnan(value):
            return value
    return largest
