"""POST /start_profile and /stop_profile: a trace of the engine's steps."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from headrace.base import env
from headrace.serving.access import require_admin
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["control"], dependencies=[Depends(require_admin)])


class ProfileRequest(BaseModel):
    """Where the trace goes (a folder of the server's machine; by default one in the cache folder),
    and after how many steps it ends by itself."""

    model_config = ConfigDict(extra="forbid", strict=True)

    output_dir: str | None = Field(default=None, min_length=1, max_length=1000)
    num_steps: int | None = Field(default=None, ge=1)


@router.post("/start_profile", responses=replies())
async def start_profile(
    service: Annotated[Service, Depends(service_of)], body: ProfileRequest | None = None
) -> dict[str, Any]:
    """Begin a trace; one at a time."""
    asked = body or ProfileRequest()
    folder = asked.output_dir or str(env.cache_dir() / "profiles")
    return {
        "success": True,
        **await service.control("start_profile", folder=folder, steps=asked.num_steps),
    }


@router.post("/stop_profile", responses=replies())
async def stop_profile(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """End it; says where the file is."""
    return {"success": True, **await service.started_engine.control("stop_profile")}
