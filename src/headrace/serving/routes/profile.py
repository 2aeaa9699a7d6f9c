"""POST /start_profile and /stop_profile: a trace of the engine's steps."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from headrace.base import env
from headrace.serving.access import require_admin
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["control"], dependencies=[Depends(require_admin)])

Stage = Literal["prefill", "decode"]
Activity = Literal["CPU", "GPU", "CUDA_PROFILER"]


class ProfileRequest(BaseModel):
    """What to profile, in the words of SGLang.

    The trace goes into a folder of the server's machine, by default one in the cache folder, and
    ends by itself after `num_steps`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    output_dir: str | None = Field(default=None, min_length=1, max_length=1000)
    num_steps: int | None = Field(default=None, ge=1)
    start_step: int | None = Field(default=None, ge=0)
    activities: list[Activity] | None = Field(default=None, min_length=1, max_length=3)
    profile_by_stage: bool = False
    profile_stages: list[Stage] | None = Field(default=None, min_length=1, max_length=2)
    with_stack: bool = False
    record_shapes: bool = False
    profile_prefix: str = Field(default="", max_length=100, pattern=r"^[A-Za-z0-9._-]*$")

    @property
    def stages(self) -> list[Stage]:
        """Each gets a trace of its own; none: one trace of whatever comes."""
        if self.profile_stages is not None:
            return self.profile_stages
        return ["prefill", "decode"] if self.profile_by_stage else []


@router.post("/start_profile", responses=replies())
async def start_profile(
    service: Annotated[Service, Depends(service_of)], body: ProfileRequest | None = None
) -> dict[str, Any]:
    """Begin a trace; one at a time."""
    asked = body or ProfileRequest()
    options: dict[str, Any] = {
        "start_step": asked.start_step,
        "activities": asked.activities,
        "stages": asked.stages,
        "with_stack": asked.with_stack,
        "record_shapes": asked.record_shapes,
        "prefix": asked.profile_prefix,
    }
    return {
        "success": True,
        **await service.control(
            "start_profile",
            folder=asked.output_dir or str(env.cache_dir() / "profiles"),
            steps=asked.num_steps,
            **{name: value for name, value in options.items() if value},
        ),
    }


@router.post("/stop_profile", responses=replies())
async def stop_profile(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """End it; says where the files are."""
    return {"success": True, **await service.started_engine.control("stop_profile")}
