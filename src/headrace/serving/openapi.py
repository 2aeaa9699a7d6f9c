"""What /openapi.json says: the bodies from pydantic's models, replies from msgspec's structs."""

from typing import Any

import msgspec
from fastapi import FastAPI

from headrace.serving.anthropic.message_reply import MessageAnswer
from headrace.serving.errors import ErrorBody
from headrace.serving.openai.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    EmbeddingList,
    Model,
    ModelList,
)

REPLIES = (
    *(Completion, ChatCompletion, ChatChunk, EmbeddingList, MessageAnswer),
    *(Model, ModelList, ErrorBody),
)
_COMPONENTS = "#/components/schemas/{name}"

_ERROR = {
    "description": "what went wrong; always of this shape",
    "content": {
        "application/json": {"schema": {"$ref": _COMPONENTS.format(name=ErrorBody.__name__)}}
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}


def replies(
    struct: type | None = None, *, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """For `responses=` of a route: its reply, its event stream, and the errors."""
    schema: dict[str, Any] = {"type": "object"}
    if struct is not None:
        schema = {"$ref": _COMPONENTS.format(name=struct.__name__)}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if streams:
        content["text/event-stream"] = {"schema": {"description": "events, each with JSON as data"}}
    return {200: {"description": "success", "content": content}, **ERRORS}


def describe(app: FastAPI) -> None:
    """Let the app's description hold the structs that its routes refer to."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = make()
            _, components = msgspec.json.schema_components(REPLIES, ref_template=_COMPONENTS)
            schemas = described.setdefault("components", {}).setdefault("schemas", {})
            assert schemas.keys().isdisjoint(components), "two of one name"
            schemas.update(components)
        return app.openapi_schema or described

    app.openapi = openapi  # type: ignore[method-assign]
