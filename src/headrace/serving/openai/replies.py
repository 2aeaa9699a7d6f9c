"""Replies of the OpenAI routes, whole and streamed.

Structs of msgspec: encoded in half a microsecond, and described in /openapi.json from the same
definition. Fields that are UNSET are left out, the others are there, null where they are empty.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens read and made, all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(
        cls, prompt_tokens: int, made: int, cached_tokens: int, reasoning_tokens: int | None = None
    ) -> "Usage":
        """`reasoning_tokens`: `None` is left out."""
        reasoning = UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
        cached = PromptTokensDetails(cached_tokens)
        return cls(prompt_tokens, made, prompt_tokens + made, cached, reasoning)


class PromptLogprob(msgspec.Struct):
    """As vLLM shows the logprobs of a prompt: token id -> this."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


# ---- /v1/completions


class CompletionLogprobs(msgspec.Struct):
    """One entry per token in each list; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    hidden_states: list[float | None] | UnsetType | None = UNSET


class Completion(msgspec.Struct):
    """The reply of /v1/completions, and each chunk of it in a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


# ---- /v1/chat/completions


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """`arguments` is JSON as text; in a stream its next piece."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """`index` in a stream only, `id` and `type` with the first piece."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The answer. Reasoning has both names that clients look for."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What is new of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    hidden_states: list[float | None] | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    hidden_states: list[float | None] | UnsetType | None = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    matched_stop: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The reply of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- /v1/embeddings


class Embedding(msgspec.Struct):
    """The vector of one text: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Tokens read, all texts together."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(msgspec.Struct):
    """The reply of /v1/embeddings, in the order of the input."""

    id: str
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


# ---- /v1/score


class Score(msgspec.Struct):
    """How alike two texts are: the cosine of their embeddings."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct):
    """The reply of /v1/score to pairs of texts, in their order."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"


class TokenScores(msgspec.Struct):
    """The reply of /v1/score to items: the probability of each label behind each of them."""

    scores: list[list[float]]
    model: str
    created: int
    usage: Usage
    object: Literal["scoring"] = "scoring"


# ---- /v1/models


class Model(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "headrace"
    parent: None = None


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"
