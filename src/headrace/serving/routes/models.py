"""GET /v1/models and /v1/models/{name}"""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import json_response
from headrace.serving.openai.replies import Model, ModelList
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=replies(ModelList))
async def list_models(service: Annotated[Service, Depends(service_of)]) -> Response:
    """The names this server answers to."""
    return json_response(ModelList([_model(service, name) for name in service.model_names]))


@router.get("/v1/models/{name:path}", responses=replies(Model))
async def retrieve_model(name: str, service: Annotated[Service, Depends(service_of)]) -> Response:
    """One of them; without a name, as some clients ask, all."""
    if not name:
        return await list_models(service)
    return json_response(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> Model:
    info = service.info
    return Model(
        id=name, created=service.started, root=info.model, max_model_len=info.max_model_len
    )
