"""The body of /v1/embeddings."""

from typing import Literal

from headrace.serving.openai.field_types import PromptField, RequestFields, RequestId


class EmbeddingRequest(RequestFields):
    """Vectors of one or several texts.

    `pooling` (last or mean) and `normalize` are ours, see `PoolingParams`. openai-python asks for
    base64 where its caller does not say, and turns it into numbers by itself.
    """

    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None
