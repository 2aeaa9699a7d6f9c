"""The body of /v1/messages."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.serving.openai.field_types import Objects, Texts


class TurnOfTalk(BaseModel):
    """One message; its content is a text or blocks."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: str | Objects


class CountRequest(BaseModel):
    """Whose tokens are counted; a conversation with what belongs to its prompt."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    messages: list[TurnOfTalk] = Field(min_length=1, fail_fast=True)
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessageRequest(CountRequest):
    """Answer a conversation."""

    max_tokens: int
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
