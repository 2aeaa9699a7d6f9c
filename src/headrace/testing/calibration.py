"""How far plain eager of the model's own dtype is from float32: what rounding alone does.

Half precision has no tolerance that suits all models: one rounds a hundredfold of another. So the
plainest engine there is (torch operators, torch_native attention, one sequence at a time, no cache)
runs the workload in that dtype first, and a configuration may be off by a few times as much.
What plain eager itself does wrong in that dtype is not excused by this: the loose bounds of
`comparison.HALF` stay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.testing.comparison import Tolerance, place_error, worst
from headrace.testing.reference import Reference, Scored
from headrace.testing.workload import TOP, Wave

# Rounding differs from one order of sums to another; a divergence is about an error squared.
FACTORS = Tolerance(logprob=2.0, divergence=3.0, excused=2.0)
# Of models so small or smooth that rounding hardly shows: some units in the last place.
FLOORS = {
    "bfloat16": Tolerance(logprob=0.03, divergence=5e-5, excused=0.02),
    "float16": Tolerance(logprob=0.004, divergence=1e-6, excused=0.01),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainError:
    """What plain eager of a dtype is off by: largest logprob, mean divergence in nats, share of the
    places where it would choose another token."""

    logprob: float
    divergence: float
    other_tokens: float


def measure(
    plain: Reference, own: Callable[[Wave, int], Scored], work: Sequence[Wave]
) -> PlainError:
    """Run the workload along the reference's own tokens.

    Args:
        plain: plain eager in the dtype to measure.
        own: what the reference says about a prompt of a wave.
    """
    errors, others = [], 0
    for wave in work:
        for index, (prompt, params) in enumerate(zip(wave.prompts, wave.params, strict=True)):
            wanted = own(wave, index)
            found = plain.score(prompt, params, forced=wanted.picks)
            others += sum(a != b for a, b in zip(found.picks, wanted.picks, strict=True))
            for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
                top = ours.topk(min(TOP + 1, len(ours)))
                listed = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
                errors.append(place_error(listed, theirs))
    return PlainError(
        logprob=worst(error.difference for error in errors),
        divergence=sum(error.divergence for error in errors) / len(errors),
        other_tokens=others / len(errors),
    )


def calibrated(loose: Tolerance, plain: PlainError, dtype: str) -> Tolerance:
    """`FACTORS` times what plain eager is off by, and a little, but never more than `loose`."""
    floor = FLOORS[dtype]
    return Tolerance(
        logprob=_least(loose.logprob, FACTORS.logprob * plain.logprob + floor.logprob),
        divergence=_least(
            loose.divergence, FACTORS.divergence * plain.divergence + floor.divergence
        ),
        excused=_least(loose.excused, FACTORS.excused * plain.other_tokens + floor.excused),
    )


def _least(loose: float, usual: float) -> float:
    """Not a number counts as far off, and leaves the loose bound."""
    return usual if usual < loose else loose
