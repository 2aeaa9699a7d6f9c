"""Which path runs a batch: a table built once, best path first, eager last.

The same predicates answer `choose` in the hot path and `explain` outside it, and every choice is
counted by (path, reason why better ones were refused).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.decision import Decision, Refusal
from headrace.batch.facts import BatchFacts, Bucket
from headrace.execution.path import ForwardPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    path: ForwardPath
    bucket: Bucket
    refused: tuple[Refusal, ...]


class Selector:
    """Takes the first path that admits the facts.

    Args:
        paths: best first; the last one admits everything.
        absent: paths this runner does not have at all, with the reason; they head every
            explanation so that nobody has to guess.
    """

    def __init__(self, paths: Sequence[ForwardPath], absent: Sequence[Refusal] = ()) -> None:
        self.paths = tuple(paths)
        self._absent = tuple(absent)
        self._eager_because = ""
        self.counts: Counter[tuple[str, str]] = Counter()

    def make_ready(self, facts: BatchFacts) -> None:
        """Let paths capture or compile what such a batch needs, before it is chosen for."""
        if self._eager_because:
            return
        for path in self.paths:
            path.make_ready(facts)

    def prepare_more(self) -> bool:
        """Let one path make one more bucket ready, the best path first; False: all are ready."""
        return any(path.prepare_more() for path in self.paths)

    def choose(self, facts: BatchFacts) -> Choice:
        choice = self._find(facts)
        self.counts[choice.path.name, "; ".join(map(str, choice.refused))] += 1
        return choice

    def explain(self, facts: BatchFacts) -> Decision[str]:
        """What `choose` would take for such a batch, without counting it."""
        choice = self._find(facts)
        return Decision(
            name="path",
            value=choice.path.name,
            reason="the first path that admits the batch",
            refused=choice.refused,
        )

    def only_eager(self, reason: str) -> None:
        """Refuse all paths but the last for this reason from now on; "" ends it."""
        self._eager_because = reason

    def _find(self, facts: BatchFacts) -> Choice:
        refused = list(self._absent)
        for path in self.paths:
            answer = path.admits(facts)
            if self._eager_because and path is not self.paths[-1]:
                answer = Refusal(subject=path.name, reason=self._eager_because)
            if isinstance(answer, Bucket):
                return Choice(path=path, bucket=answer, refused=tuple(refused))
            refused.append(answer)
        raise AssertionError("the last path of a selector admits every batch")
