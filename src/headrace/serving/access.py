"""Who may call: API key and admin key."""

import secrets

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.serving.errors import ApiError
from headrace.serving.server_config import ServerConfig
from headrace.serving.service import service_of

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})


def bearer(headers: Headers) -> str:
    """The key of `Authorization: Bearer KEY`, or else of Anthropic's `x-api-key`, or nothing."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def same(given: str, key: str | None) -> bool:
    """Compared in constant time. Header values are read as Latin-1, and keys are sent as UTF-8."""
    return key is not None and secrets.compare_digest(given.encode("latin-1"), key.encode())


class ApiKey:
    """401 for requests without the key, where there is one. Health, metrics and the status page,
    whose figures need it, stay open, and so does asking with OPTIONS what is allowed."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._may(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "The API key is missing or wrong; send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        config = self._config
        if scope["type"] != "http" or config.api_key is None:
            return True
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return True
        given = bearer(Headers(scope=scope))
        return same(given, config.api_key) | same(given, config.admin_api_key)


async def require_admin(request: Request) -> None:
    """For `Depends` of the routes that change or reveal what runs.

    Raises:
        ApiError: 403 when they are off, or for another key than the admin's.
    """
    config = (await service_of(request)).config
    if config.enable_admin or same(bearer(request.headers), config.admin_api_key):
        return
    if config.admin_api_key is None:
        raise ApiError(
            403,
            f"{request.url.path} is off; start the server with --admin-api-key KEY or "
            "--enable-admin",
            code="admin_off",
        )
    raise ApiError(403, f"{request.url.path} needs the admin key", code="admin_only")
