"""The body of /v1/chat/completions."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.serving.openai.field_types import Objects
from headrace.serving.openai.sampling_fields import SamplingFields


class Message(BaseModel):
    """One message; what else it brings (name, tool_calls, ...) goes to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: str | Objects | None = None


class ChatRequest(SamplingFields):
    """Answer a conversation."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | float | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
