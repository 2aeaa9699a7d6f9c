"""The body of /v1/responses."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from headrace.serving.openai.field_types import Objects, Texts


class ResponseRequest(BaseModel):
    """Answer an input: a text, or the items of a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    include: Texts | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    user: str | None = None
