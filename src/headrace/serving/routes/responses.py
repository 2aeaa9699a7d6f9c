"""POST /v1/responses; nothing is stored, so what there was cannot be asked for."""

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import Answer
from headrace.serving.body_route import BodyRoute
from headrace.serving.generation import Generation
from headrace.serving.openapi import replies
from headrace.serving.responses.response_plan import plan_response
from headrace.serving.responses.response_reply import ResponseReply
from headrace.serving.responses.response_request import ResponseRequest
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
ROUTE = "/v1/responses"


@router.post(ROUTE, responses=replies(streams=True))
async def create_response(
    body: ResponseRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Answer an input."""
    model = service.check_model(body.model)
    service.ready_engine()
    name = f"resp_{uuid.uuid4().hex}"
    plan = await plan_response(service, body, name)
    streams = bool(body.stream)
    generation = Generation(service, [plan.submit], name=name, route=ROUTE, streams=streams)
    reply = ResponseReply(body, plan, generation, model)
    return Answer(generation, reply, reply.failure)
