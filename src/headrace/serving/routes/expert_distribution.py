"""POST /start_, /stop_ and /dump_expert_distribution_record: how tokens spread over experts."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from headrace.base import env
from headrace.serving.access import require_admin
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["control"], dependencies=[Depends(require_admin)])


class StartRequest(BaseModel):
    """What is recorded; by default what the server was started with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["stat", "per_pass", "per_token"] | None = None


class DumpRequest(BaseModel):
    """Where the file goes: a folder of the server's machine, by default one in the cache folder."""

    model_config = ConfigDict(extra="forbid", strict=True)

    output_dir: str | None = Field(default=None, min_length=1, max_length=1000)


@router.post("/start_expert_distribution_record", responses=replies())
async def start_expert_distribution_record(
    service: Annotated[Service, Depends(service_of)], body: StartRequest | None = None
) -> dict[str, Any]:
    """Record from the next forward on; what was recorded before is forgotten."""
    mode = None if body is None else body.mode
    return {"success": True, **await service.control("start_expert_distribution", mode=mode)}


@router.post("/stop_expert_distribution_record", responses=replies())
async def stop_expert_distribution_record(
    service: Annotated[Service, Depends(service_of)],
) -> dict[str, Any]:
    """Record no more; what was recorded waits to be dumped."""
    return {"success": True, **await service.control("stop_expert_distribution")}


@router.post("/dump_expert_distribution_record", responses=replies())
async def dump_expert_distribution_record(
    service: Annotated[Service, Depends(service_of)], body: DumpRequest | None = None
) -> dict[str, Any]:
    """Write what was recorded; says where the file is."""
    folder = (body or DumpRequest()).output_dir or str(env.cache_dir() / "expert_distribution")
    return {"success": True, **await service.control("dump_expert_distribution", folder=folder)}
