"""GET /health, /health_generate, /ping, /version: for load balancers and people in a hurry."""

import asyncio
import uuid
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.base.errors import HeadraceError
from headrace.request.messages import Submit
from headrace.request.sampling_params import SamplingParams
from headrace.serving.answer import json_response
from headrace.serving.errors import answer_to, unavailable
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of
from headrace.version import __version__

router = APIRouter(tags=["health"])

GENERATE_SECONDS = 20


@router.head("/ping", include_in_schema=False)
@router.get("/ping", responses=replies())
async def ping() -> dict[str, str]:
    """200 as long as the HTTP server answers."""
    return {"status": "ok"}


@router.get("/version", responses=replies())
async def version() -> dict[str, str]:
    """The version of Headrace."""
    return {"version": __version__}


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=replies())
async def health(service: Annotated[Service, Depends(service_of)]) -> Any:
    """200 when requests are taken, else 503 with the state. Never waits for the engine, so a long
    prefill does not show here; /health_generate asks for a token."""
    state = service.state
    if state == "ready":
        return {"status": "ok"}
    trouble = service.trouble
    told = f"The server is {state}" + (f": {trouble}" if trouble else "")
    return unavailable(told, state).response()


@router.get("/health_generate", responses=replies())
async def health_generate(service: Annotated[Service, Depends(service_of)]) -> Response:
    """200 when the engine made a token for this very request; 503 also while the server drains."""
    engine, info = service.started_engine, service.info
    if service.is_draining:
        raise unavailable("The server is draining", "draining")
    probe = Submit(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_token_ids=[(info.eos_token_ids or [0])[0]],
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
    )
    try:
        async with asyncio.timeout(GENERATE_SECONDS), aclosing(engine.generate(probe)) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    return json_response({"status": "ok"})
    except TimeoutError:
        raise unavailable(f"No token within {GENERATE_SECONDS} s", "slow") from None
    except HeadraceError as error:
        raise answer_to(error) from error
    raise unavailable("The probe ended without a token", "failed")
