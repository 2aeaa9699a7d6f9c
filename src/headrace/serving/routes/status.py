"""GET / and GET /status.json: the status page and its figures."""

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from headrace.serving.answer import json_response
from headrace.serving.observability.history import Sample
from headrace.serving.observability.page import status_page
from headrace.serving.openapi import ERRORS, replies
from headrace.serving.service import Service, service_of
from headrace.version import __version__

router = APIRouter(tags=["observability"])

ENGINE_SECONDS = 0.25
"""How long the page's figures wait for new steps, which the engine tells between two of them."""

_HTML = {"description": "the page", "content": {"text/html": {"schema": {"type": "string"}}}}


@router.get("/", responses={200: _HTML, **ERRORS}, response_class=Response)
async def page() -> Response:
    """The status page: one file that asks /status.json, /explain and the chat route."""
    return status_page()


@router.get("/status.json", responses=replies())
async def status(
    service: Annotated[Service, Depends(service_of)],
    sample: Annotated[int, Query(ge=0, description="the last sample known")] = 0,
    step: Annotated[int, Query(ge=0, description="the last step known")] = 0,
) -> Response:
    """State, load, the last ten minutes by second, and the last steps with the paths they took.
    With `sample` and `step`, numbers of an earlier reply: only what came after them."""
    engine, figures = service.engine, service.figures
    told: dict[str, Any] = {
        "version": __version__,
        "models": service.model_names,
        "state": service.state,
        "trouble": service.trouble,
        "now": time.time(),
        "started": service.started,
        "in_flight": len(service.in_flight),
        "engine": None,
    }
    steps_are_new = False
    if engine is not None:
        info = engine.info
        steps_are_new = await figures.ask_steps(engine, ENGINE_SECONDS)
        told["engine"] = {
            "pid": info.pid,
            "summary": info.summary,
            "restarts": engine.restarts,
            "max_running_requests": info.max_running_requests,
            "kv_tokens": info.kv_tokens,
            "max_model_len": info.max_model_len,
            "page_size": info.page_size,
            "has_tokenizer": service.tokenizer is not None,
            "has_chat_template": bool(service.tokenizer and service.tokenizer.has_chat_template),
            "load": msgspec.structs.asdict(engine.load),
        }
    told["samples"] = {"fields": Sample._fields, "rows": service.history.since(sample)}
    told["steps"] = {**figures.steps_after(step), "are_new": steps_are_new}
    return json_response(told)
