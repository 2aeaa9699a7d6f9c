"""The application: middleware, routes, and one shape for whatever goes wrong."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headrace.base.errors import HeadraceError
from headrace.base.log import get_logger
from headrace.serving import openapi
from headrace.serving.access import ApiKey
from headrace.serving.answer import INTERNAL
from headrace.serving.answer_headers import TOLD, AnswerHeaders
from headrace.serving.body_limits import BodyLimits
from headrace.serving.body_route import ShortWay
from headrace.serving.errors import ApiError, answer_to, from_faults
from headrace.serving.other_paths import meant
from headrace.serving.routes import ROUTERS
from headrace.serving.server_config import names
from headrace.serving.service import Service
from headrace.version import __version__

log = get_logger(__name__)


def make_app(service: Service) -> FastAPI:
    """An ASGI app that serves `service`, whose engine may come later."""
    config = service.config
    app = FastAPI(
        title="Headrace",
        version=__version__,
        description="Headrace serves a large language model over OpenAI's API.",
        root_path=config.root_path or "",
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    openapi.describe(app)
    _answer_errors(app)
    # The one added last is asked first.
    routes = [route for router in ROUTERS for route in router.routes]
    app.add_middleware(ShortWay, routes=routes)
    app.add_middleware(BodyLimits, most_bytes=config.max_body_bytes)
    app.add_middleware(ApiKey, config=config)
    if config.cors_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=names(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=TOLD,
        )
    app.add_middleware(AnswerHeaders)
    return app


def _answer_errors(app: FastAPI) -> None:
    async def refusal(_: Request, error: Any) -> Response:
        return answer_to(error).response()

    async def faults(_: Request, error: Any) -> Response:
        # The framework puts before the field where it stands: body, query, path.
        found = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
        return from_faults(found).response()

    async def http_error(request: Request, error: Any) -> Response:
        return _from_http(request, error).response()

    async def bug(_: Request, error: Exception) -> Response:
        return ApiError(500, INTERNAL).response()

    app.add_exception_handler(ApiError, refusal)
    app.add_exception_handler(HeadraceError, refusal)
    app.add_exception_handler(RequestValidationError, faults)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)


def _from_http(request: Request, error: HTTPException) -> ApiError:
    """Errors of the framework: no such path, another method, a body that cannot be read."""
    cause = error.__cause__
    if isinstance(cause, ApiError):
        return cause  # raised while the body was read
    place = f"{request.method} {request.url.path[:200]}"
    told, code, headers = str(error.detail), None, dict(error.headers or {})
    if error.status_code == 404:
        paths = [path for path in request.app.openapi()["paths"] if path != "/"]
        told = f"There is no {place}; {meant(request.url.path, paths)}"
        code = "no_such_path"
    elif error.status_code == 405:
        told, code = f"{place} is not allowed; the header Allow says what is", "wrong_method"
        methods = request.app.openapi()["paths"].get(request.url.path)
        if methods is not None:  # the framework names those of one function only
            headers["Allow"] = ", ".join(sorted(method.upper() for method in methods))
    elif error.status_code == 400:
        told, code = "The body cannot be read as JSON", "invalid_json"
    return ApiError(error.status_code, told, code=code, headers=headers)
