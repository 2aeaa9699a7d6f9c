"""The reply of /v1/embeddings, from the deltas of a generation."""

from base64 import b64encode

import numpy as np

from headrace.serving.errors import unavailable
from headrace.serving.generation import Generation
from headrace.serving.openai.replies import (
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    PromptTokensDetails,
)


class EmbeddingReply:
    """Makes the reply to one request.

    Args:
        as_base64: vectors as base64 of little-endian float32, a third of the size of numbers.
    """

    def __init__(self, generation: Generation, model: str, *, as_base64: bool) -> None:
        self._generation, self._model, self._as_base64 = generation, model, as_base64

    async def whole(self) -> EmbeddingList:
        """Wait for all vectors.

        Raises:
            ApiError: one of them was aborted.
        """
        vectors: dict[int, bytes] = {}
        async for place, delta in self._generation.deltas():
            if delta.embedding is not None:
                vectors[place] = delta.embedding
            elif delta.finished is not None:
                raise unavailable(f"Prompt {place} was aborted: {delta.finished.message}", "abort")
        tokens, cached = self._generation.prompt_tokens, self._generation.cached_tokens
        return EmbeddingList(
            id=self._generation.record.id,
            model=self._model,
            data=[Embedding(place, self._shown(vectors[place])) for place in sorted(vectors)],
            usage=EmbeddingUsage(tokens, tokens, PromptTokensDetails(cached)),
        )

    def _shown(self, vector: bytes) -> list[float] | str:
        if self._as_base64:
            return b64encode(vector).decode()
        numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
        return numbers
