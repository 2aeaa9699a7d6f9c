"""However an engine's process or its parent ends: a clear error, soon, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from children import (
    FAULTY,
    LONG,
    SHORT,
    Answer,
    answer,
    exhaust,
    is_a_zombie,
    is_gone,
    request,
    running,
    tiny_config,
)
from faulty_engine import CRASHES

from headrace.base.errors import (
    ConfigError,
    EngineDeadError,
    NotFoundError,
    UnavailableError,
)
from headrace.engine.client import EngineClient

SOON = 20.0  # seconds; a hundredth of it is measured, and the machine may be busy


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in this test."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_killed_in_mid_stream_started_again_and_drained(
    llama_folder: Path, own_folder: Path
) -> None:
    async def run() -> None:
        client = await EngineClient.start(tiny_config(llama_folder), restart=True, program=FAULTY)
        assert client.load.pages_free == client.load.pages_total > 0  # known before any request
        assert not list(own_folder.iterdir())  # the socket's name is gone once both have it
        await killed(client)
        await started_again(client)
        await drained_by_a_signal(client)
        assert not list(own_folder.iterdir())

    async def killed(client: EngineClient) -> None:
        pid = client.info.pid
        async with running(client, request()) as stream:
            os.kill(pid, signal.SIGKILL)
            at = time.monotonic()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await exhaust(stream)
            assert time.monotonic() - at < SOON
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # not even a zombie
        assert client.state == "starting"
        with pytest.raises(UnavailableError, match="starting"):
            await answer(client, request())

    async def started_again(client: EngineClient) -> None:
        while client.state == "starting":
            await asyncio.sleep(0.01)
        assert (client.state, client.restarts) == ("ready", 1)
        assert client.load.pages_free == client.load.pages_total > 0
        assert (await answer(client, request(params=SHORT))).endings()[0].reason == "length"

    async def drained_by_a_signal(client: EngineClient) -> None:
        streams = [asyncio.create_task(answer(client, request())) for _ in range(6)]
        while client.load.running < 6:
            await asyncio.sleep(0.001)
        os.kill(client.info.pid, signal.SIGTERM)
        while client.state != "draining":
            await asyncio.sleep(0.001)
        with pytest.raises(UnavailableError, match="stopped"):
            await answer(client, request())
        for came in await asyncio.gather(*streams):
            assert [ending.reason for ending in came.endings()] == ["length"]
        assert await client.wait_dead() == "it was asked to stop"
        assert client.state == "dead"
        with pytest.raises(EngineDeadError, match="asked to stop"):
            await answer(client, request())

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_stop_lets_end_what_can_and_aborts_the_rest(llama_folder: Path) -> None:
    many = replace(LONG, n=8)  # one after the other

    async def run() -> tuple[Answer, Answer]:
        client = await EngineClient.start(
            tiny_config(llama_folder, max_running_requests=1), program=FAULTY
        )
        pid = client.info.pid
        first = asyncio.create_task(answer(client, request(params=SHORT)))
        waits = asyncio.create_task(answer(client, request(params=many)))
        while not client.load.running:
            await asyncio.sleep(0)
        stopping = asyncio.create_task(client.stop(drain_seconds=60.0))
        await first
        await client.stop()
        await stopping
        assert (client.state, client.death) == ("dead", "it was asked to stop")
        assert is_gone(pid)
        return await first, await waits

    first, waits = asyncio.run(asyncio.wait_for(run(), 60))
    assert [ending.reason for ending in first.endings()] == ["length"]
    (ending,) = waits.endings(many.n - 1)
    assert (ending.reason, ending.message) == ("abort", "the engine was stopped")


def test_a_crash_ends_streams_and_calls_and_is_final_without_restart(llama_folder: Path) -> None:
    async def run() -> None:
        client = await EngineClient.start(tiny_config(llama_folder), program=FAULTY)
        async with running(client, request()) as stream:
            crashing = client.generate(request([CRASHES]))
            waiting = [exhaust(crashing), exhaust(stream), ask_when_it_has_crashed(client)]
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, EngineDeadError)
                assert "SIGSEGV" in str(error)
        assert "SIGSEGV" in await client.wait_dead()
        await client.stop()  # of a dead one: nothing to do
        with pytest.raises(EngineDeadError):
            await client.control("stats")

    async def ask_when_it_has_crashed(client: EngineClient) -> None:
        while not is_a_zombie(client.info.pid):
            time.sleep(0.001)  # and not `await`, so that the client has not noticed yet
        await client.control("stats")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_parent_that_is_killed_takes_its_engine_along(llama_folder: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("killed_parent.py")), str(llama_folder)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    deadline = time.monotonic() + SOON
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())


def test_a_start_that_fails_raises_the_engines_own_error(own_folder: Path) -> None:
    async def run() -> None:
        with pytest.raises(NotFoundError, match="Model 'no such model' not found") as caught:
            await EngineClient.start(tiny_config(Path("no such model")))
        assert "smollm2" in caught.value.remedy

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not list(own_folder.iterdir())


def test_a_process_that_ends_before_it_is_ready_is_told_so(own_folder: Path) -> None:
    async def start(program: list[str]) -> None:
        await EngineClient.start(tiny_config(Path("m")), program=program)

    with pytest.raises(EngineDeadError, match=r"before it was ready.*exit code 7"):
        asyncio.run(start([sys.executable, "-c", "raise SystemExit(7)"]))
    with pytest.raises(FileNotFoundError):
        asyncio.run(start(["no-such-program"]))
    assert not list(own_folder.iterdir())


def test_a_start_that_is_cancelled_leaves_no_process(own_folder: Path) -> None:
    program = [sys.executable, "-c", "import time; time.sleep(60)"]

    async def run() -> None:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(EngineClient.start(tiny_config(Path("m")), program=program), 0.2)
        assert time.monotonic() - started < SOON

    asyncio.run(run())
    with pytest.raises(ChildProcessError):  # none is left to wait for
        os.waitpid(-1, os.WNOHANG)
    assert not list(own_folder.iterdir())


def test_a_folder_too_deep_for_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        asyncio.run(EngineClient.start(tiny_config(Path("m"))))
    assert not list(deep.iterdir())
