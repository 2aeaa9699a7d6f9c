"""Prefill graphs, with a recorder that needs no GPU, equal eager through the whole engine."""

import random
from pathlib import Path
from typing import Any

import pytest
from operator_recorder import as_if_on_a_gpu
from same_answer import Comparison
from tiny_engine import make_engine, run_all, run_alone

from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams

NEW_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_on_a_gpu(monkeypatch)
    # pieces run as they were traced; compiling them is the slow test's
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )


@pytest.fixture(params=["llama", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def engine_of(folder: Path, kind: str, **options: Any) -> Engine:
    return make_engine(folder, prefill_graph=kind, **options)


def steps(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in engine.stats()["paths"]:
        counts[entry["path"]] = counts.get(entry["path"], 0) + entry["steps"]
    return counts


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_every_length_alone_and_together(folder: Path, kind: str) -> None:
    prompts = [ids(length, length) for length in LENGTHS]
    params = [GREEDY] * len(prompts)
    comparison = Comparison(run_alone(engine_of(folder, "off"), prompts, params))
    engine = engine_of(folder, kind, enable_prefix_cache=False)
    comparison.check(run_alone(engine, prompts, params))
    assert steps(engine)["prefill_graph"] == len(LENGTHS) - 1  # all but the prompt of one token
    comparison.check(run_all(engine, prompts, params))


@pytest.mark.parametrize("chunk", [3, 29, 64])
def test_chunks_prefixes_and_mixed_steps(folder: Path, chunk: int) -> None:
    shared = ids(40, 1)
    prompts = [shared + ids(length, length) for length in (5, 30, 77)] + [ids(12, 9)] * 2
    params = [GREEDY] * len(prompts)
    comparison = Comparison(run_alone(engine_of(folder, "off"), prompts, params))
    engine = engine_of(folder, "breakable", chunked_prefill_size=chunk)
    handles = []
    for prompt in prompts:  # they arrive while others decode
        handles.append(engine.add(prompt, GREEDY))
        engine.step()
        engine.step()
    while not all(handle.is_finished for handle in handles):
        engine.step()
    engine.settle()
    engine.scheduler.check_integrity()
    outputs = [handle.output() for handle in handles]
    comparison.check(outputs)
    comparison.check(run_all(engine, prompts, params))
    assert max(output.cached_tokens for output in outputs) >= 16
    assert steps(engine)["prefill_graph"] > len(prompts)


def test_prompt_logprobs(folder: Path) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    prompts = [ids(21, 4), ids(64, 5), ids(70, 6)]
    expected = run_all(engine_of(folder, "off"), prompts, [params] * 3)
    engine = engine_of(folder, "breakable", chunked_prefill_size=32)
    found = run_all(engine, prompts, [params] * 3)
    Comparison(expected).check(found)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.prompt_logprobs is not None
        assert theirs.prompt_logprobs is not None
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        for got, want in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert got is not None
            assert want is not None
            for token, entry in want.items():
                assert got[token].logprob == pytest.approx(entry.logprob, abs=2e-4)
    assert steps(engine)["prefill_graph"] >= 5


def test_nan_in_padding_and_unused_memory_changes_nothing(folder: Path) -> None:
    prompts = [ids(length, length) for length in (5, 18, 35, 70)]
    comparison = Comparison(run_alone(engine_of(folder, "off"), prompts, [GREEDY] * 4))
    engine = engine_of(folder, "breakable", enable_prefix_cache=False)
    pool = engine.worker.runner.token_to_kv_pool
    for layer in range(pool.num_layers):
        for tensor in pool.key_value(layer):
            tensor.fill_(float("nan"))
    path = engine.worker.runner.paths.prefill_graph
    assert path is not None
    for _ in range(2):
        comparison.check(run_alone(engine, prompts, [GREEDY] * 4))
        for buffer in path._inputs._attended.values():
            buffer.fill_(float("nan"))  # what an earlier step may have left behind
    assert steps(engine)["prefill_graph"] == 8


def test_a_long_prompt_then_a_short_one_in_the_same_bucket(folder: Path) -> None:
    short, long = ids(33, 2), ids(48, 3)
    first = Comparison(run_all(engine_of(folder, "off"), [short], [GREEDY]))
    engine = engine_of(folder, "breakable", enable_prefix_cache=False)
    run_all(engine, [long], [GREEDY])
    first.check(run_all(engine, [short], [GREEDY]))
    path = engine.worker.runner.paths.prefill_graph
    assert path is not None
    assert [bucket.tokens for bucket in path.prepare().seconds] == [48]


def test_auto_captures_at_the_second_ask_while_serving(llama_folder: Path) -> None:
    engine = engine_of(llama_folder, "auto")
    prompts = [ids(20, seed) for seed in range(3)]
    comparison = Comparison(run_alone(engine_of(llama_folder, "off"), prompts, [GREEDY] * 3))
    comparison.check(run_alone(engine, prompts, [GREEDY] * 3))
    assert steps(engine) == {"eager": 3 * NEW_TOKENS - 2, "prefill_graph": 2}
    refused = [entry["refused"] for entry in engine.stats()["paths"]]
    assert any("prefill_graph: not captured yet" in text for text in refused)
    assert any("prefill_graph: the step holds no prompt tokens" in text for text in refused)


def test_all_can_be_captured_before_the_first_step(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runner.resolve.capture_conflicts", lambda *_: ())
    engine = engine_of(
        llama_folder, "auto", capture="all", chunked_prefill_size=20, max_running_requests=4
    )
    path = engine.worker.runner.paths.prefill_graph
    assert path is not None
    assert [bucket.tokens for bucket in path.prepare().seconds] == [32, 16, 8, 4]
    run_all(engine, [ids(20, 1)], [GREEDY])
    assert steps(engine)["prefill_graph"] == 1


def test_its_memory_is_measured_and_reserved(llama_folder: Path) -> None:
    runner = engine_of(llama_folder, "breakable", chunked_prefill_size=20).worker.runner
    (measured,) = [each for each in runner.measured if each.name == "prefill_graph_bytes"]
    assert "for 48 tokens" in measured.reason  # 20 and a row for each of 16 sequences
    lines = {line.name: line.bytes for line in runner.kv_budget.lines}
    assert lines["prefill graphs"] == measured.value > 0
