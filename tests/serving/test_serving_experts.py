"""Routed experts in native replies, and recordings of their distribution, the whole way."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from running_server import RunningServer
from starlette.testclient import TestClient
from tiny_engine import write_checkpoint

from headrace import LLM, SamplingParams
from headrace.serving.app import make_app

PROMPT = [*range(30, 47)]
NEW = 5
LAYERS, CHOSEN = 2, 2
BODY: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe") / "moe", "moe")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(
        folder,
        *("--enable-return-routed-experts", "--expert-distribution-recorder-mode", "stat"),
        *("--enable-admin", "--context-length", "128", "--max-num-seqs", "4"),
    )
    yield running
    running.kill()


def post(server: RunningServer, path: str, body: dict[str, Any] | None = None) -> Any:
    answer = httpx2.post(server.url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_experts_come_as_sglang_sends_them(server: RunningServer, folder: Path) -> None:
    plain, asked = (
        post(server, "/generate", BODY | extra)["meta_info"]
        for extra in ({}, {"return_routed_experts": True})
    )
    assert "routed_experts" not in plain
    ids = np.frombuffer(base64.b64decode(asked["routed_experts"]), dtype=np.int32)
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW, ignore_eos=True, return_routed_experts=True
    )
    options = {"load_format": "dummy", "device": "cpu", "max_model_len": 128, "seed": 0}
    with LLM(str(folder), enable_return_routed_experts=True, **options) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    expected = output.routed_experts
    assert expected is not None
    assert expected.shape == (len(PROMPT) + NEW - 1, LAYERS, CHOSEN)
    assert np.array_equal(ids.reshape(expected.shape), expected)


def test_a_recording(server: RunningServer, tmp_path: Path) -> None:
    assert post(server, "/start_expert_distribution_record")["mode"] == "stat"
    post(server, "/generate", BODY)
    post(server, "/stop_expert_distribution_record")
    post(server, "/generate", BODY)
    told = post(server, "/dump_expert_distribution_record", {"output_dir": str(tmp_path)})
    content = torch.load(told["path"], weights_only=True)
    # The beginning of the prompt lies in the prefix cache since the test before.
    read = len(PROMPT) - 16 + NEW - 1
    assert content["logical_count"].sum(1).tolist() == [read * CHOSEN] * LAYERS
    answer = httpx2.post(server.url + "/stop_expert_distribution_record")
    assert answer.status_code == 400
    assert "Start it first" in answer.json()["error"]["message"]


def test_the_routes_are_admins_and_know_their_bodies(make_service, engine) -> None:
    paths = [f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump")]
    closed = TestClient(make_app(make_service()))
    assert [closed.post(path).status_code for path in paths] == [403] * 3
    http = TestClient(make_app(make_service(enable_admin=True)), raise_server_exceptions=False)
    assert [http.post(path).status_code for path in paths] == [200] * 3
    names = [name for name, _ in engine.controls[-3:]]
    assert names == [f"{verb}_expert_distribution" for verb in ("start", "stop", "dump")]
    for path, body in ((paths[0], {"mode": "all"}), (paths[2], {"folder": "x"})):
        assert http.post(path, json=body).status_code == 400
    assert http.post(paths[0], json={"mode": "per_token"}).status_code == 200
    assert engine.controls[-1] == ("start_expert_distribution", {"mode": "per_token"})
