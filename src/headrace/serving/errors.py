"""One shape for every error: {"error": {message, type, param, code}}, as OpenAI's clients read it.

Messages are bounded: what somebody sent never comes back at length, and no path of the server.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from headrace.base.errors import (
    EngineDeadError,
    HeadraceError,
    RequestError,
    TooLongError,
    UnavailableError,
    UnsupportedError,
)
from headrace.base.shown import shown

LONGEST_MESSAGE = 1000
_LISTED_FAULTS = 5
_LONGEST_FAULT = 180
_TRIED = re.compile(r"(str|int|float|bool|(list|dict)\[.*\])")  # a branch of a union of types
_FIELD = re.compile(r"[a-z][a-z0-9_]*(\[[0-9]+\])?(\.[a-z0-9_]+)*")
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorDetail(msgspec.Struct):
    """What went wrong: for people, its kind, the field it is about, a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: what is wrong and what to do; cut to `LONGEST_MESSAGE` characters.
        param: the field it is about. code: a word for programs.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)
        kind = _TYPES.get(status, "invalid_request_error")
        if status >= 500:
            kind = "unavailable_error" if status == 503 else "server_error"
        self.body = ErrorBody(ErrorDetail(_bounded(message), kind, _bounded(param, 200), code))

    def response(self) -> Response:
        return Response(
            self.encoded(), self.status, headers=self.headers, media_type="application/json"
        )

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400 for a field that cannot be honoured."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """503 for what may work a moment later."""
    return ApiError(503, message, code=code, retry_after=retry_after)


def answer_to(error: ApiError | HeadraceError) -> ApiError:
    """The answer to an error of the engine: those of a request are the sender's, others ours."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, EngineDeadError):
        return unavailable(message, "engine_dead")
    if isinstance(error, UnavailableError):
        return unavailable(message, "unavailable")
    if isinstance(error, TooLongError):
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, message, param=_field_named(error.what))
    if isinstance(error, UnsupportedError):
        return ApiError(400, message, code="unsupported")
    return ApiError(500, message)


def check_count(count: int, most: int, told: str, field: str | None = None) -> None:
    """Refuse more prompts, or continuations of them, than one request may bring.

    Args:
        most: `max_prompts` of the server.
        told: how many there are, as "input has 2000 parts".
    """
    if count > most:
        ending = f"at most {most} go together (--max-prompts of headrace serve)"
        raise invalid(f"{told}; {ending}", field)


@contextmanager
def of_prompt(place: int | None, param: str | None = None) -> Iterator[None]:
    """Errors of the engine that come out of it become answers.

    Args:
        place: of the prompt among several. param: the field that brings it.
    """
    try:
        yield
    except HeadraceError as error:
        answer = answer_to(error)
        detail = answer.body.error
        detail.param = param or detail.param
        if place is not None:
            detail.message = _bounded(f"Prompt {place}: {detail.message}")
        raise answer from error


@contextmanager
def with_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that come out of it name the fields as the sender knows them.

    Args:
        names: of fields inside -> those of the sender.
    """
    try:
        yield
    except (ApiError, HeadraceError) as error:
        answer = answer_to(error)
        detail = answer.body.error
        inside = detail.param or ""
        if inside in names:
            detail.param = names[inside]
            detail.message = _bounded(detail.message.replace(inside, names[inside], 1))
        raise answer from error


@contextmanager
def of_fields() -> Iterator[None]:
    """Faults that a request model finds become 400."""
    try:
        yield
    except ValidationError as error:
        raise from_faults(error.errors(include_url=False)) from None


def from_faults(faults: Sequence[Any]) -> ApiError:
    """400 for what a request model found: the first few faults, each in a short sentence.

    Their places begin with a field.
    """
    if faults and faults[0].get("type") == "json_invalid":
        return _not_json(faults[0])
    told, first = [], None
    for fault in faults[:_LISTED_FAULTS]:
        place = _place(fault.get("loc", ()))
        first = first or place
        reason = str(fault.get("msg", "is not valid"))
        value = (
            "" if fault.get("type") == "missing" else f" (it is {shown(fault.get('input'), 60)})"
        )
        told.append(f"{place or 'body'}: {reason}{value}"[:_LONGEST_FAULT])
    if len(faults) > _LISTED_FAULTS:
        told.append(f"and {len(faults) - _LISTED_FAULTS} more faults")
    return ApiError(400, "; ".join(told) or "The body is not valid", param=first)


def _not_json(fault: Mapping[str, Any]) -> ApiError:
    reason = str(fault.get("ctx", {}).get("error", ""))[:100]
    return ApiError(400, f"The body is not JSON: {reason}", code="invalid_json")


def _place(location: Sequence[Any]) -> str | None:
    """messages.0.role of ("messages", 0, "role"); stop of ("stop", "str"), what was tried there."""
    named = [str(part) for part in location if not _TRIED.fullmatch(str(part))]
    return ".".join(named)[:80] or None


def _field_named(what: str) -> str | None:
    """`temperature` of "temperature is -1": our messages about options begin with the field."""
    first, _, rest = what.partition(" ")
    is_field = rest.startswith(("is ", "has ")) and _FIELD.fullmatch(first)
    return first if is_field else None


def _bounded(text: str | None, most: int = LONGEST_MESSAGE) -> Any:
    """The text as UTF-8 can carry it, at most so many characters."""
    if text is None:
        return None
    plain = text.encode("utf-8", "replace").decode()
    return plain if len(plain) <= most else plain[: most - 4] + " ..."
