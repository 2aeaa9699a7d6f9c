"""Token counts of replies."""

from msgspec import UNSET

from headrace.serving.openai.replies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int | None = None,
) -> Usage:
    """`reasoning_tokens`: `None` is left out."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
        completion_tokens_details=UNSET
        if reasoning_tokens is None
        else CompletionTokensDetails(reasoning_tokens),
    )
