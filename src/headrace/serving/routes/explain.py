"""GET /explain: what was decided and why; the paths that steps took, or those of one request."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from headrace.serving.answer import json_response
from headrace.serving.errors import ApiError
from headrace.serving.openapi import replies
from headrace.serving.service import REMEMBERED_RECORDS, Service, service_of

router = APIRouter(tags=["information"])


@router.get("/explain", responses=replies())
async def explain(
    service: Annotated[Service, Depends(service_of)],
    request: Annotated[str | None, Query(max_length=200, description="id of an answer")] = None,
) -> Response:
    """The plan with every decision, memory, and how many steps took which path and why not a
    better one. With `request`: the paths that this answer's steps took."""
    if request is not None:
        record = service.records.get(request)
        if record is None:
            raise ApiError(
                404,
                f"No answer with the id {request!r} among the last {REMEMBERED_RECORDS} that ended",
                param="request",
                code="no_such_request",
            )
        return json_response(record.as_dict())
    told = await service.control("explain")
    told["serving"] = [
        asdict(decision) | {"text": str(decision)} for decision in service.readers.decisions
    ]
    return json_response(told)
