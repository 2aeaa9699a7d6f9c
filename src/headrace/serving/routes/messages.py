"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import Answer, json_response
from headrace.serving.anthropic.message_plan import message_prompt, plan_message
from headrace.serving.anthropic.message_reply import MessageAnswer, MessageReply, failure_event
from headrace.serving.anthropic.message_request import CountRequest, MessageRequest
from headrace.serving.body_route import BodyRoute
from headrace.serving.generation import Generation
from headrace.serving.openapi import replies
from headrace.serving.prompts import encode
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)
ROUTE = "/v1/messages"


@router.post(ROUTE, responses=replies(MessageAnswer, streams=True))
async def create_message(
    body: MessageRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Answer a conversation."""
    model = service.check_model(body.model)
    service.ready_engine()
    name = f"msg_{uuid.uuid4().hex}"
    plan = await plan_message(service, body, name)
    streams = bool(body.stream)
    generation = Generation(service, [plan.submit], name=name, route=ROUTE, streams=streams)
    return Answer(generation, MessageReply(plan, generation, model, body.max_tokens), failure_event)


@router.post(f"{ROUTE}/count_tokens", responses=replies())
async def count_tokens(
    body: CountRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """How many tokens the prompt of a conversation has."""
    service.check_model(body.model)
    text = await message_prompt(service, body)
    ids = await encode(service, text, add_special_tokens=False, must_fit=False)
    return json_response({"input_tokens": len(ids)})
