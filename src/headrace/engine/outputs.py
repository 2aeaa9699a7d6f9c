"""What the engine gives back. Field names follow vLLM's `RequestOutput`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.base.unknown_names import attributes_answered
from headrace.engine.other_words import EMBEDDING_WORDS, OUTPUT_WORDS
from headrace.engine.token_states import TokenStates
from headrace.request.outcome import FinishReason, Logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished continuation.

    Attributes:
        token_ids: every token made, the stop token included. text: without stop token or string.
        finish_reason: stop, length, abort or error; stop_reason: the stop string, or the id among
            the request's stop_token_ids, that ended it; message: what went wrong.
        logprobs: an entry per token, id -> Logprob; `None` when not asked.
        paths: forward paths its steps took, run-length: [(path, steps), ...].
        hidden_states: those that were asked, of an abort or error what there was; `None` when not
            asked.
        routed_experts: [rows, layers with experts, k] int32, numbers of the experts of every token
            from the prompt's first on, that with the largest weight first. The last output token
            has no row, since it was never read. Of an abort or error what there was; `None` when
            not asked.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
    paths: list[tuple[str, int]]
    message: str = ""
    hidden_states: TokenStates | None = None
    routed_experts: NDArray[np.int32] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens' logprobs; `None` when they were not asked."""
        if self.logprobs is None:
            return None
        chosen = zip(self.token_ids, self.logprobs, strict=True)
        return sum(entries[token].logprob for token, entries in chosen)


@attributes_answered(OUTPUT_WORDS)
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One finished request: the prompt and its n continuations.

    Attributes:
        prompt: the text (of a conversation: as the chat template wrote it), `None` when token ids
            were given.
        prompt_logprobs: an entry per prompt token, the first `None`; `None` when not asked.
        cached_tokens: prompt tokens taken from the prefix cache.
        paths, hidden_states, routed_experts: those of the first continuation.
        finished: always true; the continuations say how they ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    cached_tokens: int

    @property
    def finished(self) -> bool:
        return True

    @property
    def paths(self) -> list[tuple[str, int]]:
        return self.outputs[0].paths

    @property
    def hidden_states(self) -> TokenStates | None:
        return self.outputs[0].hidden_states

    @property
    def routed_experts(self) -> NDArray[np.int32] | None:
        return self.outputs[0].routed_experts


@attributes_answered(EMBEDDING_WORDS)
@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """One finished embedding.

    Attributes:
        embedding: [H], or [dimensions] where fewer were asked, float32; `None` where the request
            ended by abort or error, see `finish_reason`.
        prompt: the text, `None` when token ids were given.
        cached_tokens: prompt tokens taken from the prefix cache.
        paths: forward paths its steps took, run-length: [(path, steps), ...].
        finish_reason: stop, abort or error; message: what went wrong.
    """

    request_id: str
    embedding: NDArray[np.float32] | None
    prompt: str | None
    prompt_token_ids: Sequence[int]
    cached_tokens: int
    paths: list[tuple[str, int]]
    finish_reason: FinishReason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New output of one continuation since the piece before.

    `finish_reason`, `hidden_states` and `routed_experts`, of all positions, are set on the last
    piece only, `prompt_logprobs` on the first one of the first continuation, `embedding` on the one
    piece of a request for that; `text` may be empty while characters or stop strings are
    incomplete.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str = ""
    embedding: NDArray[np.float32] | None = None
    hidden_states: TokenStates | None = None
    routed_experts: NDArray[np.int32] | None = None
