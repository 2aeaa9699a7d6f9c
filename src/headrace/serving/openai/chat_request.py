"""The body of /v1/chat/completions."""

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from headrace.serving.openai.field_types import Objects
from headrace.serving.openai.sampling_fields import SamplingFields

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NEAR = 0.8  # of difflib: usr, assistent, tools; not model


class Message(BaseModel):
    """One message; what else it brings (name, tool_calls, ...) goes to the chat template, and so
    do roles of a model's own."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: str | Objects | None = None

    @field_validator("role")
    @classmethod
    def _is_no_misspelt_one(cls, role: str) -> str:
        """Templates leave out messages of roles that they do not know, or show them to the model as
        nobody trained it to."""
        close = get_close_matches(role.strip().lower(), _ROLES, n=1, cutoff=_NEAR)
        if close and role not in _ROLES:
            raise ValueError(f"did you mean {close[0]}?")
        return role


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
