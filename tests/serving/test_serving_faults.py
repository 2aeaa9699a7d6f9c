"""What fails beside the engine: files that change under a running server, disks that are full."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import torch
from running_server import RunningServer
from tiny_engine import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.base import env

ANSWER = {"prompt": "Hello", "max_tokens": 2}


def with_weights(tiny_folder: Path, folder: Path) -> Path:
    """A copy of the checkpoint with weights; returns their file."""
    with torch.random.fork_rng():
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tiny_folder / name).read_text())
    return folder / "model.safetensors"


def test_weights_that_are_cut_short_before_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    """The engine that runs goes on; the next one cannot start, and the server says so and ends."""
    weights = with_weights(tiny_folder, tmp_path)
    server = RunningServer(
        tmp_path, *("--load-format", "auto", "--context-length", "64"), "--on-engine-death=restart"
    )
    try:
        with httpx2.Client(base_url=server.url, timeout=30) as http:
            pid = http.get("/server_info").json()["engine"]["pid"]
            before = http.post("/v1/completions", json={**ANSWER, "seed": 1}).json()
            os.truncate(weights, weights.stat().st_size // 2)
            after = http.post("/v1/completions", json={**ANSWER, "seed": 1}).json()
            assert after["choices"] == before["choices"]
            os.kill(pid, signal.SIGKILL)
        told = server.wait_for("The engine could not be started again").string
        assert "model.safetensors" in told
        assert server.status() == 1
        assert "The engine is dead" in server.lines[-1]
    finally:
        server.kill()


def until(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_log_or_trace_that_cannot_be_written_stops_nothing(tiny_folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--load-format=dummy", "--device=cpu", "--dtype=float32", "--context-length=64"]
    with Path("/dev/full").open("w") as full:  # every write fails, as on a full disk
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "headrace.cli.main", "serve", str(tiny_folder), *flags),
                *(f"--port={port}", "--log-requests", "--log-level=debug", "--enable-admin"),
            ],
            stdout=full,
            stderr=full,
            env=env.child_environment({"OMP_NUM_THREADS": "1"}),
        )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:

            def is_ready() -> bool:
                try:
                    return http.get("/health").status_code == 200
                except httpx2.ConnectError:
                    return False

            until(is_ready, process)
            for _ in range(3):
                assert http.post("/v1/completions", json=ANSWER).status_code == 200
            refused = http.post("/start_profile", json={"output_dir": "/dev/full/traces"})
            assert refused.status_code == 400
            assert "/dev/full/traces" in refused.json()["error"]["message"]
            assert http.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
