"""The HTTP client: many streams at once over aiohttp, on uvloop where it is installed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import aiohttp
import msgspec

from headrace.base.errors import ConfigError, UnavailableError
from headrace.bench.serve.record import Record
from headrace.bench.serve.stream import EventLines, error_of_body
from headrace.bench.serve.work import Job

Result = TypeVar("Result")
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_SECONDS = 30.0
QUESTION_SECONDS = 10.0
RETRY_SECONDS = 0.25
# Less than uvicorn keeps an idle connection: one that both sides end at once is a failed request.
KEEP_ALIVE_SECONDS = 4.0
OURS = ("prompt", "messages", "stream", "n")  # fields of the body that the benchmark depends on


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and what every request asks of it.

    Attributes:
        base_url: http://host:port, without /v1. endpoint: completions or chat.
        model: its name there. api_key: sent as a bearer token; "" for none.
        ignore_eos: ask to go on after the model's own end, so that outputs have their full length.
        extra_body: more fields of the body.
        timeout: seconds that a request may take; `None` for any.
    """

    base_url: str
    endpoint: str
    model: str
    api_key: str = ""
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name in OURS:
            if name in self.extra_body:
                raise ConfigError(
                    f"--extra-body has the field {name!r}",
                    why="the benchmark sets it itself",
                    remedy="Leave it out",
                )

    def body(self, job: Job) -> bytes:
        """The body of the request, as JSON."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": job.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "completions":
            fields["prompt"] = job.prompt
        elif job.is_chat:
            fields["messages"] = job.prompt
        else:
            fields["messages"] = [{"role": "user", "content": job.prompt}]
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode({**fields, **self.extra_body})


def check_jobs(target: Target, jobs: list[Job]) -> None:
    """Raise `ConfigError` where a prompt is of a kind that the endpoint does not take."""
    for job in jobs:
        is_ids = not isinstance(job.prompt, str) and not job.is_chat
        if target.endpoint == "chat" and is_ids:
            raise ConfigError(
                "--endpoint chat takes no token ids", remedy="Use text, or --endpoint completions"
            )
        if target.endpoint == "completions" and job.is_chat:
            raise ConfigError("--endpoint completions takes no messages", remedy="Use chat")


class Client:
    """Sends requests to one target; made by `connect`."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._url = target.base_url + ENDPOINTS[target.endpoint]

    async def send(self, body: bytes, record: Record) -> None:
        """Send a request and write down what comes; errors end in the record."""
        lines = EventLines()
        record.begin(perf_counter())
        try:
            async with self._session.post(self._url, data=body) as answer:
                if answer.status != 200:
                    told = error_of_body(await answer.read())
                    record.fail(f"HTTP {answer.status}: {told}", perf_counter())
                    return
                async for data in answer.content.iter_any():
                    now = perf_counter()
                    for payload in lines.feed(data):
                        record.take(payload, now)
            record.close(perf_counter())
        except TimeoutError:
            record.fail("timed out", perf_counter())
        except (aiohttp.ClientError, OSError) as error:
            record.fail(f"{type(error).__name__}: {error}", perf_counter())


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Client]:
    async with _session(target.api_key, target.timeout) as session:
        yield Client(target, session)


def _session(api_key: str, timeout: float | None) -> aiohttp.ClientSession:
    """One that opens as many connections as there are requests, and keeps them."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS),
        headers=headers,
    )


async def ask_json(base_url: str, path: str, api_key: str, *, post: bool = False) -> Any:
    """One small question to the server.

    Returns:
        What it answered, or `None` where it has no such route.

    Raises:
        UnavailableError: it cannot be reached, or refuses.
    """
    async with _session(api_key, QUESTION_SECONDS) as session:
        try:
            async with session.request("POST" if post else "GET", base_url + path) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # Of a connection that is refused aiohttp speaks of ssl, whether or not there is any.
            why = getattr(error, "strerror", "") or str(error) or type(error).__name__
            raise UnavailableError(
                f"{base_url} cannot be reached",
                why=why,
                remedy="Start the server, or give its address with --base-url",
            ) from None
    if answer.status in (404, 405):
        return None
    if answer.status != 200:
        raise UnavailableError(f"{base_url}{path} answers {answer.status}", why=error_of_body(body))
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")


async def listed_models(base_url: str, api_key: str, wait: float) -> list[str]:
    """The names of the models that the server lists.

    Args:
        wait: seconds to wait for a server that starts.

    Raises:
        UnavailableError: it does not answer in time.
    """
    deadline = perf_counter() + wait
    while True:
        try:
            listed = await ask_json(base_url, "/v1/models", api_key)
            break
        except UnavailableError:
            if perf_counter() >= deadline:
                raise
            await asyncio.sleep(RETRY_SECONDS)
    try:
        return [str(model["id"]) for model in listed["data"]]
    except (TypeError, LookupError):
        return []


def run_async(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine on the fastest loop there is; ctrl-c cancels it."""
    new_loop: Callable[[], asyncio.AbstractEventLoop]
    try:
        from uvloop import new_event_loop as new_loop
    except ImportError:
        new_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main())
