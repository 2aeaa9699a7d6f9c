"""The reply of /v1/score, from the deltas of a generation."""

import math
import time
from collections.abc import Sequence

import numpy as np

from headrace.serving.errors import unavailable
from headrace.serving.generation import Generation
from headrace.serving.openai.replies import Score, ScoreList, TokenScores, Usage
from headrace.serving.openai.score_plan import ScorePlan


class ScoreReply:
    """Makes the reply to one request.

    Args:
        normalizes: probabilities of the labels add up to 1.
    """

    def __init__(
        self, generation: Generation, plan: ScorePlan, model: str, *, normalizes: bool
    ) -> None:
        self._generation, self._plan, self._model = generation, plan, model
        self._normalizes = normalizes

    async def whole(self) -> TokenScores | ScoreList:
        """Wait for all prompts.

        Raises:
            ApiError: one of them was aborted.
        """
        logprobs: dict[int, list[float]] = {}
        vectors: dict[int, np.ndarray] = {}
        async for place, delta in self._generation.deltas():
            if delta.embedding is not None:
                vectors[place] = np.frombuffer(delta.embedding, "<f4")
            elif delta.logprobs:
                entries = delta.logprobs[0]
                logprobs[place] = [entries[label].logprob for label in self._plan.labels]
            elif delta.finished is not None and place not in logprobs:
                raise unavailable(f"Prompt {place} was aborted: {delta.finished.message}", "abort")
        if self._plan.labels:
            return self._of_tokens([logprobs[place] for place in sorted(logprobs)])
        scores = [float(vectors[one] @ vectors[other]) for one, other in self._plan.pairs]
        return ScoreList(
            id=self._generation.record.id,
            created=int(time.time()),
            model=self._model,
            data=[Score(*each) for each in enumerate(scores)],
            usage=Usage.of(self._generation.prompt_tokens, 0, self._generation.cached_tokens),
        )

    def _of_tokens(self, logprobs: Sequence[Sequence[float]]) -> TokenScores:
        scores = [[math.exp(value) for value in values] for values in logprobs]
        if self._normalizes:
            scores = [_softmax(values) for values in logprobs]
        return TokenScores(
            scores=scores,
            model=self._model,
            created=int(time.time()),
            usage=Usage.of(self._generation.prompt_tokens, 0, self._generation.cached_tokens),
        )


def _softmax(logprobs: Sequence[float]) -> list[float]:
    highest = max(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    return [weight / sum(weights) for weight in weights]
