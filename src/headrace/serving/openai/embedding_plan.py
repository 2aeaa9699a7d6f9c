"""From an embedding request to what runs."""

from headrace.request.messages import Submit
from headrace.request.pooling_params import PoolingParams
from headrace.serving.errors import check_count
from headrace.serving.openai.embedding_request import EmbeddingRequest
from headrace.serving.openai.prompt_submits import submits_of
from headrace.serving.openai.refused_fields import check_extra_fields
from headrace.serving.service import Service

_POOLING = ("pooling", "normalize", "dimensions")


async def plan_embeddings(service: Service, body: EmbeddingRequest, name: str) -> list[Submit]:
    """A request of the engine per text.

    Raises:
        ApiError, RequestError: what this server or model cannot do.
    """
    check_extra_fields(body, service)
    inputs = body.input
    told = f"input has {len(inputs)} parts"
    check_count(len(inputs), service.config.max_prompts, told, "input")
    given = {field: getattr(body, field) for field in _POOLING}
    pooling = PoolingParams(**{field: value for field, value in given.items() if value is not None})
    return await submits_of(service, body, name, inputs, field="input", pooling=pooling)
