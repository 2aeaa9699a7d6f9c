"""Holds outputs against a reference run.

Tokens must be equal wherever the reference's gap between its two likeliest tokens exceeds twice
the tolerance; a sequence that leaves the reference at a smaller gap is compared up to there, and
such positions are counted.
"""

from itertools import count

from headrace.engine.outputs import RequestOutput

TOLERANCE = 2e-4
EXCUSED_SHARE = 0.005


class Comparison:
    """Compares outputs with a reference run and counts what a small gap excuses."""

    def __init__(self, reference: list[RequestOutput], tolerance: float = TOLERANCE) -> None:
        self.reference, self.tolerance = reference, tolerance
        self.compared = self.excused = 0

    def check(self, outputs: list[RequestOutput]) -> None:
        for ours, theirs in zip(outputs, self.reference, strict=True):
            self._check_one(ours, theirs)
        assert self.excused <= EXCUSED_SHARE * self.compared

    def _check_one(self, ours: RequestOutput, theirs: RequestOutput) -> None:
        got, want = ours.outputs[0], theirs.outputs[0]
        assert got.logprobs is not None
        assert want.logprobs is not None
        assert len(got.token_ids) == len(want.token_ids)
        for place in count():
            if place == len(want.token_ids):
                break
            self.compared += 1
            token, expected = got.token_ids[place], want.token_ids[place]
            if token != expected:
                ranked = sorted(entry.logprob for entry in want.logprobs[place].values())
                assert len(ranked) > 1, f"token {place}: {token} instead of {expected}"
                assert ranked[-1] - ranked[-2] <= 2 * self.tolerance, f"token {place} differs"
                self.excused += 1
                break
            difference = got.logprobs[place][token].logprob - want.logprobs[place][token].logprob
            assert abs(difference) <= self.tolerance, f"logprob {place} differs by {difference}"
