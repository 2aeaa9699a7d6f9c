"""POST /abort_request: end a request by the id of its answer, or all of them."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from headrace.serving.access import require_admin
from headrace.serving.errors import invalid
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["control"])


class AbortRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    rid: str | None = Field(None, max_length=200)
    abort_all: bool = False


@router.post("/abort_request", responses=replies())
async def abort_request(
    body: AbortRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> dict[str, Any]:
    """What is aborted ends with finish_reason abort. An id that is unknown, or has ended, aborts
    nothing, which is no error: it may have ended a moment ago. All of them need the admin key."""
    engine = service.started_engine
    if body.abort_all:
        await require_admin(request)
        names = list(service.in_flight)
    elif body.rid:
        names = [body.rid] if body.rid in service.in_flight else []
    else:
        raise invalid("Send rid, the id of an answer, or abort_all: true", "rid")
    ids = [each for name in names for each in service.in_flight[name]]
    await engine.abort(ids)
    return {"success": True, "aborted": names}
