"""A chat with an OpenAI-compatible server, over the standard library's HTTP client."""

import json
from collections.abc import Generator, Iterable, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from headrace.base.errors import ConfigError, RequestError, TooLongError, UnavailableError
from headrace.bench.serve.stream import error_text
from headrace.cli.conversation import Said
from headrace.request.structured_output import StructuredOutput

SILENCE_SECONDS = 600.0  # a long prompt may be read for so long without a word
MOST_SHOWN = 400  # characters of a server's message
REFUSALS = (400, 413, 415, 422)  # of this request; another may be answered
LOCAL = ("localhost", "127.0.0.1", "::1")


class ChatServer:
    """One model of a server.

    Args:
        url: with or without /v1. model: `None` for the first that the server lists.
        fields: more fields of every request.

    Raises:
        UnavailableError: the server cannot be reached, or refuses.
        ConfigError: the address is none, or the server lists no model and none was named.
    """

    def __init__(
        self, url: str, *, api_key: str, model: str | None, fields: Mapping[str, Any]
    ) -> None:
        address = url if "://" in url else f"http://{url}"
        self.url = address.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--url is {url!r}", remedy="Give an address like http://127.0.0.1:30000"
            )
        self._headers = {"Content-Type": "application/json", "User-Agent": "headrace"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = _opener(parts.hostname)
        self._fields = fields
        self.model = model or self._first_model()

    def answer(self, messages: list[dict[str, str]]) -> Generator[Said, None, None]:
        """Stream the answer; closing the generator closes the connection, which ends it there.

        Raises:
            RequestError: the server refuses these messages. UnavailableError: it cannot answer.
        """
        body = {"model": self.model, "messages": messages, "stream": True, **self._fields}
        with self._open("/v1/chat/completions", body) as reply:
            try:
                yield from _pieces(reply)
            except (OSError, HTTPException) as error:
                yield Said(finish_reason="error", message=f"The connection was lost. {error!r}")

    def _first_model(self) -> str:
        with self._open("/v1/models", None) as reply:
            try:
                return str(json.load(reply)["data"][0]["id"])
            except (ValueError, TypeError, LookupError):
                raise ConfigError(
                    f"{self.url} lists no model", remedy="Name it with --model, and check --url"
                ) from None

    def _open(self, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, self._headers)
        try:
            reply: HTTPResponse = self._opener.open(request, timeout=SILENCE_SECONDS)
        except HTTPError as error:
            with error:
                raise _refusal(error.code, error.read()) from None
        except (OSError, HTTPException) as error:
            raise UnavailableError(
                f"{self.url} cannot be reached", why=str(getattr(error, "reason", error))
            ) from None
        return reply


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` as those of a request."""
    fields = dict(given)
    structured = fields.pop("structured", None)
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    return fields if structured is None else fields | _form(structured)


def _form(form: StructuredOutput) -> dict[str, Any]:
    if form.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(form.text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    value = list(form.choice or ()) if form.kind == "choice" else form.text
    return {"structured_outputs": {form.kind: value}}


def _opener(host: str) -> OpenerDirector:
    """No proxy stands between this machine and itself, whatever the environment says."""
    return build_opener(*([ProxyHandler({})] if host in LOCAL else []))


def _pieces(lines: Iterable[bytes]) -> Generator[Said, None, None]:
    """What the events of a stream say; a stream without an ending was cut."""
    has_ended = False
    for line in lines:
        payload = line[5:].strip() if line.startswith(b"data:") else b""
        if not payload:
            continue
        if payload == b"[DONE]":
            return
        try:
            event = json.loads(payload)
            said = _said(event)
        except (ValueError, TypeError, LookupError, AttributeError):
            yield Said(finish_reason="error", message="The server sent what is no chat chunk.")
            return
        if said is not None:
            has_ended = has_ended or said.finish_reason is not None
            yield said
    if not has_ended:
        yield Said(finish_reason="error", message="The server cut the answer.")


def _said(event: Mapping[str, Any]) -> Said | None:
    if event.get("error"):
        return Said(finish_reason="error", message=error_text(event, MOST_SHOWN))
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
    return Said(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
        finish_reason=reason,
        message=f"The server ended the answer with {reason}." if reason == "error" else "",
    )


def _refusal(status: int, body: bytes) -> Exception:
    try:
        told = json.loads(body)
    except ValueError:
        told = body.decode("utf-8", "replace")
    what, why = f"The server answers {status}", error_text(told, MOST_SHOWN)
    error = told.get("error") if isinstance(told, dict) else None
    if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
        return TooLongError(what, why=why)
    if status in REFUSALS:
        return RequestError(what, why=why)
    remedy = "Give its key with --api-key" if status in (401, 403) else ""
    return UnavailableError(what, why=why, remedy=remedy)
