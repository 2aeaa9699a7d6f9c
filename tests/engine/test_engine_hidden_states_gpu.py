"""On a CUDA device: hidden states of graphs equal eager's, and nobody waits for them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import make_engine, run_all, run_alone

from headrace.engine.engine import Engine
from headrace.engine.outputs import RequestOutput
from headrace.execution import token_ring
from headrace.execution.token_ring import TokenRing
from headrace.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 1e-3
NEW_TOKENS = 14


def asking(states: str, layers: tuple[int, ...] = (-1,), **options: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0}
    return SamplingParams(
        return_hidden_states=states, hidden_state_layers=layers, **(settings | options)
    )


PLAIN = asking("none")
FILTERED = asking("last", temperature=0.8, top_p=0.9, seed=5, logprobs=1)
MIXED = [asking("last"), PLAIN, asking("all"), FILTERED, asking("last", n=2)]
INNER = [asking("last", (0, 1)), PLAIN, asking("all", (1, -1)), asking("last")]


@pytest.fixture(params=["llama", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(4)
    return [[draw.randrange(256) for _ in range(9 + 13 * place)] for place in range(count)]


def cuda_engine(folder: Path, **options: Any) -> Engine:
    settings = {"device": "cuda", "page_size": 16, "max_total_tokens": 8192}
    return make_engine(folder, **(settings | options))


def eager_engine(folder: Path) -> Engine:
    return cuda_engine(folder, decode_graph="off", prefill_graph="off", enable_overlap=False)


def check(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal up to the token where one continuation in all may leave the other, at a near tie."""
    left = 0
    for ours, theirs in zip(found, expected, strict=True):
        for got, want in zip(ours.outputs, theirs.outputs, strict=True):
            pairs = enumerate(zip(got.token_ids, want.token_ids, strict=True))
            same = next((place for place, (x, y) in pairs if x != y), len(want.token_ids))
            left += same < len(want.token_ids)
            if want.hidden_states is None:
                assert got.hidden_states is None
                continue
            assert got.hidden_states is not None
            mine, known = got.hidden_states.states, want.hidden_states.states
            assert mine.device.type == "cpu"
            assert not mine.is_pinned()
            assert mine.shape == known.shape
            rows = len(ours.prompt_token_ids) + same - want.hidden_states.first_position
            assert (mine - known)[:rows].abs().max().item() <= TOLERANCE
    assert left <= 1


def steps_by_path(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in engine.stats()["paths"]:
        counts[entry["path"]] = counts.get(entry["path"], 0) + entry["steps"]
    return counts


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "chunked_prefill_size": 24}])
def test_a_decode_graph_leaves_the_last_state(folder: Path, options: dict[str, Any]) -> None:
    batch = prompts(len(MIXED))
    expected = run_all(eager_engine(folder), batch, MIXED)
    graph = cuda_engine(folder, decode_graph=(1, 2, 4, 8), max_running_requests=8, **options)
    check(run_all(graph, batch, MIXED), expected)
    check(run_alone(graph, batch, MIXED), expected)
    assert steps_by_path(graph)["decode_graph"] >= 5 * (NEW_TOKENS - 2)


def test_decode_graphs_keep_inner_layers(folder: Path) -> None:
    batch = prompts(len(INNER))
    expected = run_all(eager_engine(folder), batch, INNER)
    graph = cuda_engine(
        folder, decode_graph=(1, 2, 4), max_running_requests=4, hidden_state_layers=(0, 1)
    )
    check(run_all(graph, batch, INNER), expected)
    check(run_alone(graph, batch, INNER), expected)
    assert steps_by_path(graph)["decode_graph"] >= 4 * (NEW_TOKENS - 2)
    budget = {line.name: line.bytes for line in graph.worker.runner.kv_budget.lines}
    assert budget["hidden states of graphs"] == 2 * 4 * 64 * 4


def test_layers_that_graphs_do_not_keep_run_eager_and_say_why(folder: Path) -> None:
    batch = prompts(len(INNER))
    expected = run_all(eager_engine(folder), batch, INNER)
    graph = cuda_engine(folder, hidden_state_layers=(0,))
    check(run_all(graph, batch, INNER), expected)
    refused = " ".join(entry["refused"] for entry in graph.stats()["paths"])
    assert "hidden states of layers 1 are asked, which its graphs do not keep" in refused
    assert "start with hidden_state_layers 1" in refused


def test_prefill_graphs_leave_the_last_state(folder: Path) -> None:
    batch = prompts(len(MIXED))
    expected = run_all(eager_engine(folder), batch, MIXED)
    graph = cuda_engine(folder, prefill_graph="breakable", chunked_prefill_size=24)
    check(run_all(graph, batch, MIXED), expected)
    assert steps_by_path(graph)["prefill_graph"] >= 2


def test_nan_in_padding_and_unused_memory_changes_nothing(folder: Path) -> None:
    batch, params = prompts(3), [asking("last"), asking("all"), PLAIN]
    expected = run_all(eager_engine(folder), batch, params)
    graph = cuda_engine(folder, decode_graph=(4,), max_running_requests=4)
    pool = graph.worker.runner.token_to_kv_pool
    for layer in range(pool.num_layers):
        for tensor in pool.key_value(layer):
            tensor.fill_(float("nan"))
    check(run_all(graph, batch, params), expected)


def kernels(engine: Engine, params: SamplingParams) -> list[str]:
    """What 3 rows launch, by name, once all graphs are there."""
    run_all(engine, prompts(3), [params] * 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_all(engine, prompts(3), [params] * 3)
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_nobody_asks_and_nothing_is_launched(llama_folder: Path) -> None:
    options: dict[str, Any] = {"decode_graph": (4,), "prefill_graph": "off"}
    options |= {"max_running_requests": 4, "enable_prefix_cache": False}
    untouched = kernels(cuda_engine(llama_folder, **options), PLAIN)
    engine = cuda_engine(llama_folder, **options)
    asked = kernels(engine, asking("last"))
    assert sorted(kernels(engine, PLAIN)) == sorted(untouched)
    # a gather and a copy for each step, and at the start of a steady run the places of the rows
    assert len(asked) - len(untouched) <= 3 * NEW_TOKENS


def test_steady_decode_allocates_nothing_and_waits_for_the_ring_only(llama_folder: Path) -> None:
    engine = cuda_engine(llama_folder, hidden_state_layers=(1,))
    params = asking("last", (1, -1), max_tokens=200)
    handles = [engine.add(prompt, params) for prompt in prompts(4)]
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(60):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocated
    engine.abort([handle.request_id for handle in handles])


# ---- the way to the host


def test_large_tensors_go_aside_and_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ring, "ASIDE_BYTES", 1 << 12)
    ring = TokenRing(torch.device("cuda"))
    flights = []
    for step in range(6):
        large = torch.full((64, 1024), float(step), device="cuda")
        small = torch.full((3,), float(step), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            flights.append(ring.send({"tokens": small}, own={"large": large, "own": small + 1}))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        del large  # the memory must not go to the next step's tensor before it was read
    for step, flight in enumerate(flights):
        assert flight.aside is not None
        host = flight.wait()
        assert (host["large"] == step).all()
        assert host["tokens"].tolist() == [step] * 3
        assert host["own"].tolist() == [step + 1] * 3
        assert flight.aside is None


def test_copies_aside_do_not_hold_up_the_forward_stream() -> None:
    """A hundred megabytes take some 2 ms of the bus; what comes next does not wait for them."""
    ring, large = TokenRing(torch.device("cuda")), torch.ones(25 << 20, device="cuda")
    ring.send({}, own={"large": large}).wait()  # pinned memory is there from now on
    flight = ring.send({}, own={"large": large})
    behind = torch.cuda.Event()
    behind.record()
    behind.synchronize()
    assert flight.aside is not None
    assert not flight.aside[0].query()
    assert (flight.wait()["large"] == 1).all()


def test_long_prompts_with_all_states(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ring, "ASIDE_BYTES", 1 << 12)
    batch, params = prompts(8)[4:], [asking("all", (0, 1, -1)), PLAIN, asking("all"), PLAIN]
    expected = run_all(eager_engine(llama_folder), batch, params)
    check(run_all(cuda_engine(llama_folder), batch, params), expected)
