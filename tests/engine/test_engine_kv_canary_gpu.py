"""On a CUDA device: the KV canary inside decode graphs and around prefill graphs."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from canary_faults import FAULTS, GREEDY, PAGE, PROMPTS, Fault, check_named, finish, running, start
from tiny_engine import make_engine, run_all

from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu_engine(folder: Path, **options: object) -> Engine:
    settings = {
        "device": "cuda",
        "kv_canary": "raise",
        "page_size": PAGE,
        "max_total_tokens": 2048,
        "decode_graph": (1, 2, 4, 8),
        "prefill_graph": "breakable",
        "chunked_prefill_size": 32,
        "kv_canary_sweep_interval": 3,
        "attention_backend": "triton",
    }
    return make_engine(folder, **(settings | options))


@pytest.fixture(scope="module", params=["llama", "gemma"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One for all faults: whoever comes behind one must find everything sound."""
    engine = gpu_engine(request.getfixturevalue(f"{request.param}_folder"))
    yield engine
    engine.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_under_graphs_is_named(engine: Engine, fault: Fault) -> None:
    engine.flush_cache()
    ended = engine.stats()["kv_canary_sequences"]
    handles = start(engine)
    position, kind = fault.plant(engine)
    finish(engine, handles)
    outputs = [handle.output().outputs[0] for handle in handles]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    check_named(outputs[1].message, "victim", position, kind)
    assert {path for path, _ in outputs[1].paths} >= {"prefill_graph", "decode_graph"}
    assert engine.stats()["kv_canary_sequences"] == ended + 1
    alarms = engine.stats()["kv_canary_violations"]
    run_all(engine, PROMPTS, [GREEDY] * 3)
    assert engine.stats()["kv_canary_violations"] == alarms, "what came behind is sound"


def test_a_prompt_in_chunks_reads_what_its_chunks_wrote(engine: Engine) -> None:
    """The prompt's second chunk finds a key of the first one changed."""
    engine.flush_cache()
    prompt = [(7 * index) % 256 for index in range(90)]
    handle = engine.add(prompt, GREEDY, request_id="victim")
    while running_length(engine) < 32:
        engine.step()
    engine.settle()
    keys = engine.worker.runner.token_to_kv_pool.keys[0].flatten(0, 1)  # [slots, K, D]
    keys[running(engine).pages[2] * PAGE + 1, 0, 0] += 1
    finish(engine, [handle])
    output = handle.output().outputs[0]
    assert output.token_ids == []
    check_named(output.message, "victim", 2 * PAGE + 1, "real KV")


def running_length(engine: Engine) -> int:
    chooser = engine.scheduler.chooser
    return running(engine).length_bound if chooser.running else 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_random_requests_alarm_nobody(llama_folder: Path, page_size: int) -> None:
    draw = random.Random(page_size)
    engine = gpu_engine(
        llama_folder,
        page_size=page_size,
        kv_canary_real_data="all",
        max_running_requests=8,
        max_model_len=128,
        max_total_tokens=400,
        retract_every=7,
    )
    stems = [[draw.randrange(256) for _ in range(draw.randint(3, 40))] for _ in range(3)]
    handles = []
    for index in range(24):
        prompt = draw.choice(stems) + [draw.randrange(256) for _ in range(draw.randint(0, 20))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=index,
            n=draw.choice([1, 1, 2]),
            max_tokens=draw.randint(1, 30),
            stop_token_ids=tuple(draw.sample(range(256), 12)),
        )
        handles.append(engine.add(prompt, params))
        for _ in range(draw.randint(0, 3)):
            engine.step()
        if draw.random() < 0.2:
            engine.abort([draw.choice(handles).request_id], settle=draw.random() < 0.5)
    finish(engine, handles)
    stats = engine.stats()
    assert stats["kv_canary_violations"] == stats["kv_canary_sequences"] == 0
    assert stats["kv_canary_swept_pages"] > 0
    assert {entry["path"] for entry in stats["paths"]} >= {"decode_graph", "prefill_graph"}
    engine.close()


def test_without_it_a_step_launches_what_it_always_did(llama_folder: Path) -> None:
    """Kernels of a decode step: with the canary three more, and nothing else is different."""
    launched = {}
    for mode in ("off", "log"):
        engine = gpu_engine(llama_folder, kv_canary=mode, kv_canary_sweep_interval=0)
        start(engine)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                engine.step()
            engine.settle()
            torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        names = [event.name for event in profile.events() if event.device_type == on_device]
        launched[mode] = [name for name in names if "Memcpy" not in name]
        engine.close()
    own = [name for name in launched["log"] if "_before_kernel" in name or "_after_kernel" in name]
    assert len(own) == 2 * 4
    rest = [name for name in launched["log"] if name not in own]
    fills = [name for name in rest if name not in launched["off"]]
    assert len(rest) - len(launched["off"]) == 4, fills  # the count is set back
