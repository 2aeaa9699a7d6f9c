"""Start, signals and ends of the server, with an engine that is none: in this process."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2
import pytest
from fake_engine import FakeEngine

from headrace.base.errors import CheckpointError, ConfigError, EngineDeadError, UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.request.messages import Delta, Submit
from headrace.serving import launch
from headrace.serving.address import bind
from headrace.serving.descriptors import open_as_many_as_allowed
from headrace.serving.launch import Server, serve
from headrace.serving.server_config import ServerConfig

HALF_A_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b'content-length: 100\r\n\r\n{"prompt":'
)
Visit = Callable[[str, Server], Any]


class MortalEngine(FakeEngine):
    """A fake that can be started, stopped and killed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ["a"] * 400
        self.pause = 0.01
        self.dead = asyncio.Event()
        self.margins: list[float] = []

    async def wait_dead(self) -> str:
        await self.dead.wait()
        self.state, self.death = "dead", self.death or "killed by signal 9"
        return self.death

    async def stop(self, drain_seconds: float = 0.0, *, margin_seconds: float = 10.0) -> None:
        self.margins.append(margin_seconds)
        self.dead.set()


@pytest.fixture
def run(monkeypatch, tokenizer):
    """Run a server, visit it, and say how it ended."""

    def run(visit: Visit, *, engine=MortalEngine, **options: Any) -> int:
        config = ServerConfig(port=0, **options)
        listening = bind(config)
        port = listening.getsockname()[1]
        servers: list[Server] = []

        async def start(asked, *, restart) -> Any:
            made = engine()
            return await made if asyncio.iscoroutine(made) else made

        monkeypatch.setattr(launch.EngineClient, "start", start)
        monkeypatch.setattr(launch, "load_tokenizer", lambda asked: tokenizer)
        original = Server.run

        async def visited(self: Server) -> int:
            servers.append(self)
            visiting = asyncio.create_task(visit(f"http://127.0.0.1:{port}", self))
            try:
                async with asyncio.timeout(60):
                    return await original(self)
            finally:
                await visiting

        monkeypatch.setattr(Server, "run", visited)
        return serve(EngineConfig(model="tiny"), config, listening)

    return run


async def until_ready(url: str) -> None:
    async with httpx2.AsyncClient() as http, asyncio.timeout(60):
        while (await http.get(f"{url}/health")).status_code != 200:
            await asyncio.sleep(0.01)


def interrupt(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_an_idle_server(run, number) -> None:
    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        interrupt(number)

    assert run(visit) == 0


def test_a_terminal_that_closes_ends_nothing_under_nohup(run) -> None:
    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        interrupt(signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert server.service.state == "ready"
        interrupt()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(visit) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_the_deadline_requests_are_aborted_and_told(run) -> None:
    seen: list[str] = []

    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        body = {"prompt": "a", "stream": True}
        async with (
            httpx2.AsyncClient() as http,
            http.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if not seen:
                    interrupt()
                seen.append(line)

    assert run(visit, drain_seconds=0) == 0
    assert len(seen) < 100
    assert "data: [DONE]" in seen


class HangingEngine(MortalEngine):
    """Accepts nothing, aborts nothing."""

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        await self.dead.wait()
        raise EngineDeadError("The engine ended", why="its process was killed")
        yield Delta(submit.request_id)


def test_requests_of_an_engine_that_hangs_are_told_too(run, monkeypatch, caplog) -> None:
    """They were cut off without a word, after more than twenty seconds."""
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.2)
    told: list[tuple[int, str]] = []

    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        async with httpx2.AsyncClient() as http:
            asking = asyncio.create_task(http.post(f"{url}/v1/completions", json={"prompt": "a"}))
            while not server.service.in_flight:
                await asyncio.sleep(0.01)
            interrupt()
            answer = await asking
            told.append((answer.status_code, answer.json()["error"]["code"]))
        assert server.service.engine.margins[0] <= 1

    assert run(visit, engine=HangingEngine, drain_seconds=0) == 0
    assert told == [(503, "engine_dead")]
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]


def test_while_it_drains_who_asks_is_told(run) -> None:
    told: list[tuple[int, str, bool]] = []

    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        body = {"prompt": "a", "stream": True}
        async with (
            httpx2.AsyncClient() as other,
            httpx2.AsyncClient() as http,
            http.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            engine = server.service.engine
            engine.pause = 0.2  # a stream of a minute and more
            interrupt()
            while server.service.state != "draining":
                await asyncio.sleep(0.01)
            for refused in (
                await other.post(f"{url}/v1/completions", json={"prompt": "a"}),
                await other.get(f"{url}/health"),
                await other.get(f"{url}/health_generate"),
            ):
                code = refused.json()["error"]["code"]
                told.append((refused.status_code, code, "retry-after" in refused.headers))
            engine.pause = 0.0
            assert [line async for line in lines if line][-1] == "data: [DONE]"

    assert run(visit, drain_seconds=60) == 0
    assert told == [(503, "draining", True)] * 3


def test_a_second_signal_ends_it_at_once(run, caplog) -> None:
    reading: list[asyncio.Task[Any]] = []
    ended_with: list[int] = []
    servers: list[Server] = []

    async def read(url: str) -> None:
        async with httpx2.AsyncClient() as http:
            await http.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True})

    async def visit(url: str, server: Server) -> None:
        servers.append(server)
        await until_ready(url)
        reading.append(asyncio.create_task(read(url)))  # it ends with the loop
        while not server.service.in_flight:
            await asyncio.sleep(0.01)
        interrupt()
        while server.service.state != "draining":
            await asyncio.sleep(0.01)
        ended_with.append(len(server.service.in_flight))
        interrupt()

    began = time.monotonic()
    assert run(visit, drain_seconds=60) == 128 + signal.SIGTERM
    assert ended_with == [1]  # the first one alone would have let it go on
    assert time.monotonic() - began < 30
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]
    assert min(servers[0].service.engine.margins) <= 1  # a step that hangs is not waited for


@pytest.mark.parametrize("said", [b"", b"POST /v1/completions", HALF_A_BODY])
def test_who_says_half_a_thing_holds_up_no_end(run, monkeypatch, caplog, said: bytes) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.2)

    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(said)
        await asyncio.sleep(0.05)
        interrupt()
        with contextlib.suppress(ConnectionResetError):
            await reader.read()  # until it hangs up
        writer.close()

    assert run(visit) == 0
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]


def test_connections_are_kept_for_longer_than_proxies_keep_them(make_service) -> None:
    assert launch._uvicorn_config(make_service()).timeout_keep_alive > 600


def test_the_engines_death_ends_it(run, caplog) -> None:
    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        server.service.engine.dead.set()

    assert run(visit) == 1
    assert "The engine is dead: killed by signal 9" in caplog.text


def test_a_model_that_cannot_be_served_is_told(run) -> None:
    def fail() -> Any:
        raise CheckpointError("model.safetensors is cut short")

    async def visit(url: str, server: Server) -> None:
        return None

    with pytest.raises(CheckpointError, match="cut short"):
        run(visit, engine=fail)


def test_a_signal_while_the_model_loads(run) -> None:
    async def visit(url: str, server: Server) -> None:
        async with httpx2.AsyncClient() as http:
            assert (await http.get(f"{url}/ping")).status_code == 200
            answer = await http.get(f"{url}/health")
            assert answer.json()["error"]["code"] == "starting"
        interrupt()

    async def never() -> Any:
        await asyncio.Event().wait()

    assert run(visit, engine=never) == 0


def test_a_model_that_is_ready_as_the_server_goes(run, caplog) -> None:
    """The engine's start ends between the end of HTTP and that of the server."""
    servers: list[Server] = []

    async def visit(url: str, server: Server) -> None:
        servers.append(server)
        interrupt()

    async def late() -> Any:
        while not servers or servers[0]._listening.fileno() != -1:
            await asyncio.sleep(0.001)
        return MortalEngine()

    with caplog.at_level("INFO"):
        assert run(visit, engine=late) == 0
    assert "Loading tiny; http://127.0.0.1:" in caplog.text
    assert "ready after" not in caplog.text


def test_nonsense_on_a_socket_fills_no_log(run, caplog) -> None:
    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"nonsense\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        interrupt()

    assert run(visit) == 0
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"Cannot listen on 127.0.0.1:{port}.*in use.*--port"
        ):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize("host", ["203.0.113.9", "no such host", "nosuch.invalid"])
def test_an_address_that_is_not_ours(host) -> None:
    with pytest.raises(ConfigError, match=r"host"):
        bind(ServerConfig(port=0, host=host))


def test_an_ipv6_address() -> None:
    try:
        listening = bind(ServerConfig(port=0, host="::1"))
    except ConfigError as error:
        pytest.skip(str(error))
    with listening:
        assert listening.family == socket.AF_INET6


def test_as_many_connections_as_the_system_allows(caplog) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        limit = open_as_many_as_allowed(100)
        assert limit > 256
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit
        assert not caplog.records
        open_as_many_as_allowed(limit)
        assert f"Only {limit} files" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_certificate_that_is_none(run, tmp_path) -> None:
    missing = {"ssl_certfile": str(tmp_path / "a"), "ssl_keyfile": str(tmp_path / "b")}
    with pytest.raises(ConfigError, match="no such file"):
        run(None, **missing)
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    with pytest.raises(ConfigError, match="certificate"):
        run(None, **missing)


def test_a_parser_that_is_none_is_told_before_the_model_loads(run) -> None:
    with pytest.raises(UnsupportedError, match=r"'nosuch'\. Known: hermes"):
        run(None, tool_call_parser="nosuch")


def test_parsers_are_told_at_the_start(run, caplog) -> None:
    async def visit(url: str, server: Server) -> None:
        await until_ready(url)
        interrupt()

    caplog.set_level("INFO", logger="headrace")
    assert run(visit, tool_call_parser="hermes") == 0
    assert "tool_call_parser = hermes [asked]" in caplog.text
    assert "does not show tools" in caplog.text
