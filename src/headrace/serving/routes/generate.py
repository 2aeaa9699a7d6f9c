"""POST /generate: SGLang's own form of a request."""

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import Answer
from headrace.serving.body_route import BodyRoute
from headrace.serving.generation import Generation
from headrace.serving.native.generate_plan import plan_generate
from headrace.serving.native.generate_reply import GenerateReply
from headrace.serving.native.generate_request import GenerateRequest
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["native"], route_class=BodyRoute)
ROUTE = "/generate"


@router.post(ROUTE, responses=replies(streams=True))
@router.put(ROUTE, responses=replies(streams=True))
async def generate(
    body: GenerateRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue texts or token ids; one prompt gives one object, a batch a list of them."""
    service.ready_engine()
    plan = await plan_generate(service, body, uuid.uuid4().hex)
    streams = bool(body.stream)
    generation = Generation(service, plan.submits, name=plan.name, route=ROUTE, streams=streams)
    return Answer(generation, GenerateReply(plan, generation))
