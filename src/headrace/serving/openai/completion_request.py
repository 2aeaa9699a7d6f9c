"""The body of /v1/completions."""

from pydantic import Field

from headrace.serving.openai.field_types import PromptField
from headrace.serving.openai.sampling_fields import SamplingFields


class CompletionRequest(SamplingFields):
    """Continue one or several prompts."""

    prompt: PromptField
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=0, le=64)
