"""GET /model_info and /server_info, also under the older names with get_."""

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serving.answer import json_response
from headrace.serving.openapi import replies
from headrace.serving.service import Service, service_of
from headrace.version import __version__

router = APIRouter(tags=["information"])

_KEYS = ("api_key", "admin_api_key")


@router.get("/model_info", responses=replies())
@router.get("/get_model_info", responses=replies())
async def model_info(service: Annotated[Service, Depends(service_of)]) -> Response:
    """The model and its sampling defaults."""
    info = service.info
    return json_response(
        {
            "model_path": info.model_path,
            "tokenizer_path": service.asked.tokenizer or info.model_path,
            "is_generation": info.is_generation,
            "has_tokenizer": service.tokenizer is not None,
            "has_chat_template": bool(service.tokenizer and service.tokenizer.has_chat_template),
            "preferred_sampling_params": msgspec.to_builtins(info.default_params),
            "architecture": info.architecture,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "eos_token_ids": info.eos_token_ids,
            "weight_version": "default",
        }
    )


@router.get("/server_info", responses=replies())
@router.get("/get_server_info", responses=replies())
async def server_info(service: Annotated[Service, Depends(service_of)]) -> Response:
    """Every option as it was asked, what came of it, and how busy the server is. No keys."""
    engine, info = service.started_engine, service.info
    server = {name: value for name, value in asdict(service.config).items() if name not in _KEYS}
    reply: dict[str, Any] = {
        **asdict(service.asked),
        "server": server,
        "version": __version__,
        "state": service.state,
        "engine": msgspec.to_builtins(info),
        "sampling_defaults": info.sampling_defaults,
        "max_total_num_tokens": info.kv_tokens,
        "requests_in_flight": len(service.in_flight),
        "requests_without_a_token": len(service.waiting),
        "internal_states": [msgspec.structs.asdict(engine.load)],
    }
    return json_response(reply)
