"""On a CUDA device: every forward path equals eager, whatever the batch, and says that it ran."""

import random
from pathlib import Path

import pytest
import torch
from same_answer import Comparison
from tiny_engine import make_engine, run_all, run_alone

from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
FILTERED = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=30,
    min_p=0.01,
    seed=5,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    logit_bias={9: 1.5},
    min_tokens=4,
    max_tokens=NEW_TOKENS,
    ignore_eos=True,
    logprobs=2,
)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    lengths = [draw.choice((1, 5, 15, 16, 17, 40, 64, 65, 130)) for _ in range(count)]
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def cuda_engine(folder: Path, **options: object) -> Engine:
    settings = {"device": "cuda", "page_size": 16, "max_total_tokens": 8192}
    return make_engine(folder, **(settings | options))


@pytest.fixture(params=["llama", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def steps_by_path(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in engine.stats()["paths"]:
        counts[entry["path"]] = counts.get(entry["path"], 0) + entry["steps"]
    return counts


@pytest.mark.parametrize(
    ("count", "params"),
    [(1, GREEDY), (1, FILTERED), (3, FILTERED), (5, GREEDY), (8, FILTERED), (17, GREEDY)],
    ids=["1-greedy", "1-filtered", "3-filtered", "5-greedy", "8-filtered", "17-greedy"],
)
def test_decode_graph_equals_eager(folder: Path, params: SamplingParams, count: int) -> None:
    batch = prompts(count, seed=count)
    eager = cuda_engine(folder, decode_graph="off", prefill_graph="off", enable_overlap=False)
    comparison = Comparison(run_all(eager, batch, [params] * count), tolerance=1e-3)
    assert set(steps_by_path(eager)) == {"eager"}
    graph = cuda_engine(folder, decode_graph=(1, 2, 4, 8, 24), max_running_requests=24)
    comparison.check(run_all(graph, batch, [params] * count))
    comparison.check(run_alone(graph, batch, [params] * count))
    assert steps_by_path(graph)["decode_graph"] >= NEW_TOKENS - 2


def test_arrivals_aborts_and_stops_while_graphs_run(folder: Path) -> None:
    batch = prompts(12, seed=3)
    params = [GREEDY if index % 2 else FILTERED for index in range(12)]
    eager = cuda_engine(folder, decode_graph="off", prefill_graph="off", enable_overlap=False)
    comparison = Comparison(run_alone(eager, batch, params), tolerance=1e-3)
    engine = cuda_engine(folder, chunked_prefill_size=32)
    handles = []
    for index, (prompt, each) in enumerate(zip(batch, params, strict=True)):
        handles.append(engine.add(prompt, each))
        engine.step()
        if index % 3 == 2:
            aborted = engine.add(prompt, each)
            engine.step()
            engine.abort([aborted.request_id])
    while not all(handle.is_finished for handle in handles):
        engine.step()
    engine.settle()
    engine.scheduler.check_integrity()
    comparison.check([handle.output() for handle in handles])
    refused = [entry["refused"] for entry in engine.stats()["paths"]]
    assert any("the step holds prompt tokens" in text for text in refused)


def test_nan_in_padding_and_unused_memory_changes_nothing(folder: Path) -> None:
    batch = prompts(3, seed=8)
    engine = cuda_engine(folder)
    comparison = Comparison(run_all(engine, batch, [GREEDY] * 3), tolerance=1e-3)
    again = cuda_engine(folder)
    pool = again.worker.runner.token_to_kv_pool
    for layer in range(pool.num_layers):
        for tensor in pool.key_value(layer):
            tensor.fill_(float("nan"))
    comparison.check(run_all(again, batch, [GREEDY] * 3))


def test_a_long_request_then_a_short_one_in_the_same_bucket(folder: Path) -> None:
    draw = random.Random(1)
    long, short = ([draw.randrange(256) for _ in range(length)] for length in (200, 3))
    engine = cuda_engine(folder, enable_prefix_cache=False)
    first = Comparison(run_all(engine, [short], [GREEDY]), tolerance=1e-3)
    run_all(engine, [long], [GREEDY])
    first.check(run_all(engine, [short], [GREEDY]))


def test_what_a_graph_cannot_do_runs_eager_and_says_why(folder: Path) -> None:
    engine = cuda_engine(folder)
    processed = SamplingParams(
        temperature=0.7, max_tokens=4, ignore_eos=True, logprobs=1, logprobs_mode="processed"
    )
    run_all(engine, [[1, 2, 3]], [processed])
    refused = [entry["refused"] for entry in engine.stats()["paths"]]
    assert any("processed logprobs" in text for text in refused)
    many = cuda_engine(folder, decode_graph=(1, 2))
    run_all(many, prompts(3), [GREEDY] * 3)
    refused = [entry["refused"] for entry in many.stats()["paths"]]
    assert any("more rows than the largest bucket (2)" in text for text in refused)


def test_steady_decode_allocates_nothing_and_waits_for_the_ring_only(llama_folder: Path) -> None:
    engine = cuda_engine(llama_folder)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    handles = [engine.add(prompt, params) for prompt in prompts(4, seed=2)]
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")  # raises at a synchronising call, events excepted
    try:
        for _ in range(60):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocated
    engine.abort([handle.request_id for handle in handles])
