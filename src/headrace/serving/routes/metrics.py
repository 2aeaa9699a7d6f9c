"""GET /metrics: for Prometheus. Never waits long for the engine, and works without it."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.serving.observability import prometheus
from headrace.serving.observability.families import (
    distributions,
    engine_families,
    load_families,
    server_families,
)
from headrace.serving.openapi import ERRORS
from headrace.serving.service import Service, service_of

router = APIRouter(tags=["observability"])

ENGINE_SECONDS = 0.25
"""How long a scrape waits for figures by path, which the engine tells between two steps."""

_STRING = {"schema": {"type": "string"}}
_TEXT = {
    "description": "Prometheus text",
    "content": {"text/plain": _STRING, "application/openmetrics-text": _STRING},
}


@router.get("/metrics", responses={200: _TEXT, **ERRORS}, response_class=Response)
async def metrics(request: Request, service: Annotated[Service, Depends(service_of)]) -> Response:
    """Figures of requests, engine and forward paths, as Prometheus reads them."""
    engine, figures = service.engine, service.figures
    families = list(server_families(service.state, engine, service.measures, service.history))
    if engine is not None:
        await figures.ask_stats(engine, ENGINE_SECONDS)
        families += load_families(engine.load, engine.info.page_size)
        families += engine_families(engine, figures)
    body, content_type = prometheus.exposition(
        families,
        distributions(service.measures),
        model_name=service.model_names[0],
        engine_pid=None if engine is None else lambda: engine.info.pid,
        accept=request.headers.get("accept", ""),
    )
    return Response(body, media_type=content_type, headers={"cache-control": "no-store"})
