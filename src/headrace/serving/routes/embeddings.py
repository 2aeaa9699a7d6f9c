"""POST /v1/embeddings"""

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import WholeAnswer
from headrace.serving.body_route import BodyRoute
from headrace.serving.generation import Generation
from headrace.serving.openai.embedding_plan import plan_embeddings
from headrace.serving.openai.embedding_reply import EmbeddingReply
from headrace.serving.openai.embedding_request import EmbeddingRequest
from headrace.serving.openai.replies import EmbeddingList
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
ROUTE = "/v1/embeddings"


@router.post(ROUTE, responses=replies(EmbeddingList))
async def create_embeddings(
    body: EmbeddingRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Vectors of texts, made of the model's last hidden states."""
    model = service.check_model(body.model)
    service.ready_engine()
    name = body.rid or body.request_id or f"embd-{uuid.uuid4().hex}"
    submits = await plan_embeddings(service, body, name)
    generation = Generation(service, submits, name=name, route=ROUTE, streams=False)
    as_base64 = body.encoding_format == "base64"
    return WholeAnswer(generation, EmbeddingReply(generation, model, as_base64=as_base64))
