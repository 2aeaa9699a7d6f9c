"""On a CUDA device: a mixture of experts on every path equals eager, and its choice leaves them.

A choice between experts of nearly the same weight may fall otherwise on another path: few may.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from same_answer import Comparison
from tiny_engine import MOE, make_engine, run_all

from headrace.engine.engine import Engine
from headrace.engine.expert_recorder import ExpertRecorder
from headrace.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW = 16
LENGTHS = (1, 5, 16, 17, 40, 64, 65)
OTHERWISE = 0.005  # share of choices
ASKS = SamplingParams(
    temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2, return_routed_experts=True
)
WATCHED = {"enable_return_routed_experts": True, "expert_distribution_recorder_mode": "stat"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    (path / "config.json").write_text(json.dumps(MOE))
    return path


def prompts() -> list[list[int]]:
    draw = random.Random(6)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


def engine_of(folder: Path, **options: object) -> Engine:
    settings = {"device": "cuda", "page_size": 16, "max_total_tokens": 4096}
    return make_engine(folder, **(settings | WATCHED | options))


def counts_of(engine: Engine, into: Path) -> torch.Tensor:
    content = torch.load(ExpertRecorder(engine).dump(str(into))["path"], weights_only=True)
    counts: torch.Tensor = content["logical_count"]
    return counts


def test_graphs_equal_eager(folder: Path, tmp_path: Path) -> None:
    batch, params = prompts(), [ASKS] * len(LENGTHS)
    eager = engine_of(folder, decode_graph="off", prefill_graph="off", enable_overlap=False)
    ExpertRecorder(eager).start()
    expected = run_all(eager, batch, params)
    comparison = Comparison(expected, tolerance=1e-3)
    graphs = engine_of(
        folder,
        decode_graph=(1, 2, 4, 8),
        prefill_graph="breakable",
        max_running_requests=8,
        chunked_prefill_size=24,
        enable_prefix_cache=False,
    )
    run_all(graphs, batch, params)  # captures are not counted, and neither is this
    ExpertRecorder(graphs).start()
    found = run_all(graphs, batch, params)
    comparison.check(found)
    ran = {entry["path"] for entry in graphs.stats()["paths"]}
    assert {"decode_graph", "prefill_graph"} <= ran
    same = every = 0
    for ours, theirs in zip(found, expected, strict=True):
        if ours.outputs[0].token_ids == theirs.outputs[0].token_ids:
            assert ours.routed_experts.shape == theirs.routed_experts.shape
            same += (ours.routed_experts == theirs.routed_experts).sum()
            every += ours.routed_experts.size
    assert every > 0
    assert same >= (1 - OTHERWISE) * every
    counts = counts_of(graphs, tmp_path)
    for layer, row in enumerate(counts):
        chosen = np.concatenate([output.routed_experts[:, layer].flatten() for output in found])
        assert row.tolist() == np.bincount(chosen, minlength=8).tolist()
    passed = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    assert counts.sum(1).tolist() == [2 * passed] * 2
    assert counts_of(eager, tmp_path).sum(1).tolist() == [2 * passed] * 2


def test_bfloat16_graphs_agree_with_float32(folder: Path) -> None:
    """Tokens that follow a prompt, whose logprobs are large enough to be told apart."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=1)
    batch = prompts()
    exact = run_all(engine_of(folder), batch, [params] * len(batch))
    half = run_all(engine_of(folder, dtype="bfloat16"), batch, [params] * len(batch))
    gaps = []
    for ours, theirs in zip(half, exact, strict=True):
        (found,), (known,) = ours.outputs[0].logprobs, theirs.outputs[0].logprobs
        gaps.append(
            abs(max(e.logprob for e in found.values()) - max(e.logprob for e in known.values()))
        )
    assert sorted(gaps)[len(gaps) // 2] < 0.1


def test_decode_waits_for_nothing_while_experts_are_watched(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder)
    recorder = ExpertRecorder(engine)
    recorder.start("per_token")
    params = SamplingParams(
        temperature=0.0, max_tokens=120, ignore_eos=True, return_routed_experts=True
    )
    handles = [engine.add(prompt, params) for prompt in prompts()[:4]]
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(60):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.abort([handle.request_id for handle in handles])
    recorder.stop()
    recorder.dump(str(tmp_path))
