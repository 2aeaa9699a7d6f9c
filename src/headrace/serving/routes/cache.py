"""GET or POST /flush_cache: forget the cached prefixes."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from headrace.serving.access import require_admin
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["control"], dependencies=[Depends(require_admin)])


@router.get("/flush_cache", responses=replies())
@router.post("/flush_cache", responses=replies())
async def flush_cache(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """400 while requests run."""
    return {"success": True, **await service.control("flush_cache")}
