"""On a CUDA device: prefill graphs equal eager, whatever the step, and say that they ran."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from same_answer import Comparison
from tiny_engine import GEMMA, LLAMA, make_engine, run_all, run_alone

from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams
from headrace.runner.forward_paths import GRAPH_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW_TOKENS = 8
TOLERANCE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
# one token, both sides of buckets and pages, the largest bucket and beyond
LENGTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 48, 49, 64, 65, 127, 129, 193, 256, 257, 320, 321)
LONG = (500, 513, 1000, 1024, 1025)
NOT_CAPTURED = "prefill_graph: not captured yet"
LONGER = {"max_position_embeddings": 2048}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "tie_word_embeddings": True,
}


@pytest.fixture(params=["qwen3", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = {"qwen3": QWEN3, "gemma3": GEMMA}[request.param] | LONGER
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def engine_of(folder: Path, kind: str, **options: Any) -> Engine:
    settings = {
        "device": "cuda",
        "page_size": 16,
        "max_model_len": 1100,
        "max_total_tokens": 16384,
        "chunked_prefill_size": 2048,
        "max_running_requests": 16,
    }
    return make_engine(folder, prefill_graph=kind, **(settings | options))


def steps(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in engine.stats()["paths"]:
        counts[entry["path"]] = counts.get(entry["path"], 0) + entry["steps"]
    return counts


def reference(folder: Path, prompts: list[list[int]], params: SamplingParams) -> Comparison:
    engine = engine_of(folder, "off", decode_graph="off", enable_prefix_cache=False)
    outputs = run_alone(engine, prompts, [params] * len(prompts))
    assert set(steps(engine)) == {"eager"}
    return Comparison(outputs, tolerance=TOLERANCE)


def test_every_length_alone_and_together(folder: Path) -> None:
    prompts = [ids(length, length) for length in (*LENGTHS, *LONG)]
    params = [GREEDY] * len(prompts)
    comparison = reference(folder, prompts, GREEDY)
    engine = engine_of(folder, "breakable", enable_prefix_cache=False)
    comparison.check(run_alone(engine, prompts, params))
    assert steps(engine)["prefill_graph"] == len(prompts) - 2  # not those of 1 and 1025 tokens
    comparison.check(run_alone(engine, prompts[::-1], params)[::-1])
    comparison.check(run_all(engine, prompts, params))


def test_piecewise(folder: Path) -> None:
    prompts = [ids(length, length) for length in (2, 7, 20, 32, 33, 60)]
    comparison = reference(folder, prompts, GREEDY)
    engine = engine_of(folder, "piecewise", chunked_prefill_size=48, enable_prefix_cache=False)
    comparison.check(run_alone(engine, prompts, [GREEDY] * len(prompts)))
    comparison.check(run_all(engine, prompts, [GREEDY] * len(prompts)))
    assert steps(engine)["prefill_graph"] >= len(prompts)


@pytest.mark.parametrize("chunk", [3, 29, 200])
def test_chunks_prefixes_and_mixed_steps_captured_while_serving(folder: Path, chunk: int) -> None:
    shared = ids(100, 1)
    tails = (5, 30, 77, 130, 300)
    prompts = [shared + ids(length, length) for length in tails] + [ids(12, 9)] * 2
    comparison = reference(folder, prompts, GREEDY)
    engine = engine_of(folder, "auto", chunked_prefill_size=chunk)
    for _ in range(2):
        handles = []
        for prompt in prompts:  # they arrive while others decode
            handles.append(engine.add(prompt, GREEDY))
            engine.step()
            engine.step()
        while not all(handle.is_finished for handle in handles):
            engine.step()
        engine.settle()
        engine.scheduler.check_integrity()
        comparison.check([handle.output() for handle in handles])
    path = engine.worker.runner.paths.prefill_graph
    assert path is not None
    asked, captured = path._asked, path.prepare().seconds
    assert set(captured) == {bucket for bucket, times in asked.items() if times == 2}
    # Every bucket refused its first step and no other; what prefixes leave of prompts is short, so
    # that large chunks make few steps of one bucket.
    refused = [entry for entry in engine.stats()["paths"] if NOT_CAPTURED in entry["refused"]]
    assert sum(entry["steps"] for entry in refused) == len(asked)
    assert steps(engine)["prefill_graph"] >= max(2, len(captured))
    assert steps(engine)["decode_graph"] > 0


def test_prompt_logprobs(folder: Path) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    prompts = [ids(21, 4), ids(64, 5), ids(300, 6)]
    comparison = reference(folder, prompts, params)
    engine = engine_of(folder, "breakable", chunked_prefill_size=128)
    found = run_all(engine, prompts, [params] * 3)
    comparison.check(found)
    for ours, theirs in zip(found, comparison.reference, strict=True):
        assert ours.prompt_logprobs is not None
        assert theirs.prompt_logprobs is not None
        for got, want in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert got is not None
            assert want is not None
            for token in set(got) & set(want):
                assert abs(got[token].logprob - want[token].logprob) <= TOLERANCE
    assert steps(engine)["prefill_graph"] >= 3


def test_nan_in_padding_and_unused_memory_changes_nothing(folder: Path) -> None:
    prompts = [ids(length, length) for length in (5, 18, 35, 70, 300)]
    comparison = reference(folder, prompts, GREEDY)
    engine = engine_of(folder, "breakable", enable_prefix_cache=False)
    pool = engine.worker.runner.token_to_kv_pool
    for layer in range(pool.num_layers):
        for tensor in pool.key_value(layer):
            tensor.fill_(float("nan"))
    path = engine.worker.runner.paths.prefill_graph
    assert path is not None
    for _ in range(2):
        comparison.check(run_alone(engine, prompts, [GREEDY] * len(prompts)))
        for buffer in path._inputs._attended.values():
            buffer.fill_(float("nan"))  # what an earlier step may have left behind
    assert steps(engine)["prefill_graph"] == 2 * len(prompts)


def test_a_long_prompt_then_a_short_one_in_the_same_bucket(folder: Path) -> None:
    long, short = ids(320, 3), ids(257, 2)
    comparison = reference(folder, [long, short, long], GREEDY)
    engine = engine_of(folder, "breakable", enable_prefix_cache=False)
    comparison.check(run_alone(engine, [long, short, long], [GREEDY] * 3))
    path = engine.worker.runner.paths.prefill_graph
    assert path is not None
    assert [bucket.tokens for bucket in path.prepare().seconds] == [320]


def test_all_before_the_first_step_and_what_it_takes(folder: Path) -> None:
    engine = engine_of(folder, "auto", capture="all", decode_graph=(1, 2))
    runner = engine.worker.runner
    path = runner.paths.prefill_graph
    assert path is not None
    report = path.prepare()
    assert {bucket.tokens for bucket in report.seconds} == set(path.sizes)
    (measured,) = [each for each in runner.measured if each.name == "prefill_graph_bytes"]
    for_drivers = len(path.sizes) * GRAPH_BYTES  # the report counts what torch holds
    assert 0 < sum(report.bytes.values()) <= measured.value
    assert measured.value > for_drivers
    comparison = reference(folder, [ids(300, 1)], GREEDY)
    comparison.check(run_all(engine, [ids(300, 1)], [GREEDY]))
    assert steps(engine)["prefill_graph"] == 1


def test_replays_wait_for_nothing_and_allocate_nothing_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder, "breakable", enable_prefix_cache=False)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for seed in range(3):
        run_all(engine, [ids(50, seed)], [params])
    path = engine.worker.runner.paths.prefill_graph
    assert path is not None
    run, ran = path.run, []

    def watched(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")  # raises at a synchronising call
        try:
            ran.append(arguments)
            return run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(path, "run", watched)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    for seed in range(3, 6):
        run_all(engine, [ids(50, seed)], [params])
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocated
    assert len(ran) == 3
