"""Our own clients on our own server: `headrace bench serve` and `headrace chat --url`."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer

from headrace.cli.main import main


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(
        tiny_folder, "--context-length", "512", "--served-model-name", "tiny", "--api-key", "right"
    )
    yield running
    running.kill()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "right")


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bench_serve(server: RunningServer, capsys, endpoint: str) -> None:
    asked = ["--num-prompts", "12", "--input-len", "8-24", "--output-len", "5", "--json"]
    flags = ["--base-url", server.url, "--endpoint", endpoint, "--max-concurrency", "1,6"]
    assert main(["bench", "serve", *flags, *asked]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["max_concurrent_requests"] for entry in found] == [1, 6]
    for entry in found:
        assert entry["model"] == "tiny"
        assert entry["completed"] == 12
        assert entry["total_output_tokens"] == 60
        assert entry["total_input_tokens"] >= 12 * 8
        assert not [note for note in entry["notes"] if "usage" in note or "shorter" in note]
        assert 0 < entry["median_ttft_ms"] <= entry["median_e2el_ms"]
    if endpoint == "completions":
        assert found[0]["total_input_tokens"] == found[1]["total_input_tokens"] <= 12 * 24


def test_bench_serve_shows_what_the_server_refuses(server: RunningServer, capsys) -> None:
    flags = ["--base-url", server.url, "--num-prompts", "3", "--input-len", "600"]
    assert main(["bench", "serve", *flags, "--warm-up", "0"]) == 1
    assert "failed 3 times: HTTP 400: " in capsys.readouterr().out


def test_chat(server: RunningServer, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n" + "x" * 3000 + "\nHello\n"))
    flags = ["--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--sampling-seed", "1"]
    assert main(["chat", "--url", server.url, *flags]) == 0
    shown = capsys.readouterr()
    assert f"tiny at {server.url}" in shown.err
    assert shown.err.count("(cut at the length limit)") == 2
    assert shown.err.count("the conversation is full") == 1
    assert shown.out.strip()


def test_chat_with_a_wrong_key(server: RunningServer, capsys) -> None:
    assert main(["chat", "--url", server.url, "--api-key", "wrong"]) == 2
    assert "Give its key with --api-key" in capsys.readouterr().err
