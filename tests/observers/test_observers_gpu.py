"""On a CUDA device: canary, profile and dump under graphs, and nothing launched without them."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_observers_nothing_more import without_observers
from tiny_engine import make_engine, run_all
from torch.profiler import ProfilerActivity, profile

from headrace.engine.engine import Engine
from headrace.layers.triton_operators import TritonOperators
from headrace.observers.dump_diff import diff_dumps
from headrace.observers.dump_files import open_dump
from headrace.observers.numeric_canary import NumericCanary
from headrace.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (5, 33, 17, 60)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=6, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, max_tokens=7, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
]
BOTH_GRAPHS = {"decode_graph", "prefill_graph"}


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def prompts(seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


def engine_of(folder: Path, **options: Any) -> Engine:
    settings = {
        "device": "cuda",
        "page_size": 16,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "decode_graph": [4],
        "prefill_graph": "breakable",
        "enable_prefix_cache": False,
    }
    return make_engine(folder, **(settings | options))


def run(engine: Engine, seed: int = 0) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run_all(engine, prompts(seed), PARAMS)]


def paths(engine: Engine) -> set[str]:
    return {entry["path"] for entry in engine.stats()["paths"]}


def canary_of(engine: Engine) -> NumericCanary:
    (canary,) = engine.worker.runner.observers.members
    assert isinstance(canary, NumericCanary)
    return canary


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma", "bfloat16")]
)
def test_right_steps_of_graphs_raise_no_alarm_and_stay_as_they_are(
    family: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    plain = run(engine_of(folder, dtype=dtype))
    engine = engine_of(folder, dtype=dtype, numeric_canary=1)
    assert run(engine) == plain
    assert paths(engine) >= BOTH_GRAPHS
    stats = canary_of(engine).stats()
    assert not canary_of(engine).divergences
    assert stats == {"compared": engine.stats()["steps"], "diverged": 0, "left_out": 0}


def off_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused rope of decode steps turns by one position too much; the reference has none."""
    rotate = TritonOperators.rotate_and_write

    def wrong(self: Any, attention: Any, qkv: Any, rotation: Any, batch: Any) -> Any:
        if batch.mode.is_decode:
            rotation = type(rotation)(rotation.cache, rotation.positions + 1)
        return rotate(self, attention, qkv, rotation, batch)

    monkeypatch.setattr(TritonOperators, "rotate_and_write", wrong)


def stale_table(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode graph reads a table that nobody changes any more."""
    graph: Any = engine.worker.runner.paths.decode_graph
    graph._tables = {name: table.clone() for name, table in graph._tables.items()}


@pytest.mark.parametrize(("fault", "parts"), [(off_by_one, ("K",)), (stale_table, ("K", "V"))])
def test_a_fault_inside_a_decode_graph_is_named(
    fault: Callable[[Engine, pytest.MonkeyPatch], None],
    parts: tuple[str, ...],
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(llama_folder, numeric_canary=1)
    fault(engine, monkeypatch)  # before the graph is captured
    run(engine)
    found = canary_of(engine).divergences[0]
    assert (found.path, found.layer, found.parts) == ("decode_graph", 0, parts)
    assert found.backend == "triton"
    assert found.bucket.sequences == 4


def test_a_profile_shows_the_kernels_of_each_step(llama_folder: Path, tmp_path: Path) -> None:
    engine = engine_of(llama_folder)
    run(engine)  # captures
    started = engine.profiler.start(str(tmp_path), steps=4)
    run(engine)
    engine.profiler.close()
    events = json.loads(gzip.decompress(Path(started["path"]).read_bytes()))["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X"]
    spans = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in whole
        if event["name"].startswith("headrace.") and event.get("cat") == "user_annotation"
    ]
    launches = {
        event["args"]["correlation"]: event
        for event in whole
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    kernels = [event for event in whole if event.get("cat") == "kernel"]
    assert len(kernels) > 100
    held = {"prefill_graph": 0, "decode_graph": 0}
    for kernel in kernels:
        launch = launches.get(kernel["args"]["correlation"])
        if launch is None:
            continue  # launched before the profile began
        names = [name for start, end, name in spans if start <= launch["ts"] < end]
        assert names, f"{kernel['name']} was launched outside all spans"
        for path in held:
            held[path] += any(name.startswith(f"headrace.forward {path}") for name in names)
    assert min(held.values()) > 10, held


def test_dumps_of_eager_and_graph_steps_agree(llama_folder: Path, tmp_path: Path) -> None:
    for name, options in (
        ("eager", {"decode_graph": "off", "prefill_graph": "off"}),
        ("graph", {}),
    ):
        engine = engine_of(llama_folder, **options)
        engine.dumper.start(str(tmp_path / name))
        run(engine)
        engine.settle()
        engine.dumper.stop()
    found = diff_dumps(open_dump(tmp_path / "eager"), open_dump(tmp_path / "graph"))
    assert found.agrees, str(found)
    assert found.paths[0] == "eager"
    assert set(found.paths[1].split(", ")) >= BOTH_GRAPHS
    assert {each.tokens for each in found.tensors if each.name != "logits"} == {found.tokens}


def kernels(engine: Engine) -> list[str]:
    """Names of all kernels and copies of a run whose graphs are captured, in their order."""
    run(engine)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run(engine)
    on_device = [
        event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    on_device.sort(key=lambda event: event.time_range.start)
    return [event.name for event in on_device if not event.name.startswith("headrace.")]


def test_without_an_observer_no_kernel_is_launched_for_one(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_observers(engine_of(llama_folder), monkeypatch) as engine:
        expected = kernels(engine)
    assert len(expected) > 100
    assert kernels(engine_of(llama_folder)) == expected
    assert len(kernels(engine_of(llama_folder, numeric_canary=2))) > len(expected)
