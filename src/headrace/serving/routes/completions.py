"""POST /v1/completions"""

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import Answer
from headrace.serving.body_route import BodyRoute
from headrace.serving.generation import Generation
from headrace.serving.openai.completion_plan import plan_completion
from headrace.serving.openai.completion_reply import CompletionReply
from headrace.serving.openai.completion_request import CompletionRequest
from headrace.serving.openai.replies import Completion
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
ROUTE = "/v1/completions"


@router.post(ROUTE, responses=replies(Completion, streams=True))
async def create_completion(
    body: CompletionRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue prompts."""
    model = service.check_model(body.model)
    service.ready_engine()
    name = body.rid or body.request_id or f"cmpl-{uuid.uuid4().hex}"
    plan = await plan_completion(service, body, name)
    streams = bool(body.stream)
    generation = Generation(service, plan.submits, name=name, route=ROUTE, streams=streams)
    return Answer(generation, CompletionReply(body, plan, generation, model))
