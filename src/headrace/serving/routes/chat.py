"""POST /v1/chat/completions"""

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import Answer
from headrace.serving.body_route import BodyRoute
from headrace.serving.generation import Generation
from headrace.serving.openai.chat_plan import plan_chat
from headrace.serving.openai.chat_reply import ChatReply
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.replies import ChatCompletion
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
ROUTE = "/v1/chat/completions"


@router.post(ROUTE, responses=replies(ChatCompletion, streams=True))
async def create_chat_completion(
    body: ChatRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Answer a conversation."""
    model = service.check_model(body.model)
    service.ready_engine()
    name = body.rid or body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
    plan = await plan_chat(service, body, name)
    streams = bool(body.stream)
    generation = Generation(service, [plan.submit], name=name, route=ROUTE, streams=streams)
    return Answer(generation, ChatReply(body, plan, generation, model))
