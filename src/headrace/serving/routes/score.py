"""POST /v1/score and /score"""

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import WholeAnswer
from headrace.serving.body_route import BodyRoute
from headrace.serving.generation import Generation
from headrace.serving.openai.score_plan import plan_scores
from headrace.serving.openai.score_reply import ScoreReply
from headrace.serving.openai.score_request import ScoreRequest
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
ROUTE = "/v1/score"


@router.post(ROUTE, responses=replies())
@router.post("/score", responses=replies())
async def create_scores(
    body: ScoreRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Probabilities of tokens behind a query and items, or the cosine of texts' embeddings."""
    model = service.check_model(body.model)
    service.ready_engine()
    name = f"score-{uuid.uuid4().hex}"
    plan = await plan_scores(service, body, name)
    generation = Generation(service, plan.submits, name=name, route=ROUTE, streams=False)
    reply = ScoreReply(generation, plan, model, normalizes=body.apply_softmax)
    return WholeAnswer(generation, reply)
