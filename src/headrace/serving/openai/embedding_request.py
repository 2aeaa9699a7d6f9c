"""The body of /v1/embeddings."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from headrace.serving.openai.prompt_field import PromptField


class EmbeddingRequest(BaseModel):
    """Vectors of one or several texts.

    `pooling` (last or mean) and `normalize` are ours, see `PoolingParams`. openai-python asks for
    base64 where its caller does not say, and turns it into numbers by itself.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    input: PromptField
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    rid: str | None = None
    request_id: str | None = None
