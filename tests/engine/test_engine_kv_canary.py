"""The KV canary in a running engine: faults are named, others go on, and nothing else alarms it."""

import logging
import random
from pathlib import Path

import pytest
import torch
from canary_faults import (
    FAULTS,
    GREEDY,
    PAGE,
    PROMPTS,
    Fault,
    changed_key,
    check_named,
    finish,
    running,
    slot,
    start,
)
from tiny_engine import make_engine, run_all

from headrace.engine.engine import Engine
from headrace.memory.radix_node import CacheKey
from headrace.observers.tap import NO_TAPS
from headrace.request.sampling_params import SamplingParams


def canary_engine(folder: Path, **options: object) -> Engine:
    settings = {
        "kv_canary": "raise",
        "page_size": PAGE,
        "max_total_tokens": 1024,
        "cpu_graph": "off",
    }
    return make_engine(folder, **(settings | options))


@pytest.fixture(params=["llama", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture(scope="module")
def undisturbed(llama_folder: Path, gemma_folder: Path) -> dict[Path, list[list[int]]]:
    """Tokens of the three requests where nothing is wrong, and nobody looks."""
    answers = {}
    for folder in (llama_folder, gemma_folder):
        engine = canary_engine(folder, kv_canary="off")
        outputs = run_all(engine, PROMPTS, [GREEDY] * 3)
        answers[folder] = [output.outputs[0].token_ids for output in outputs]
    return answers


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_the_sequence_it_hits_and_nobody_else(
    folder: Path, fault: Fault, undisturbed: dict[Path, list[list[int]]]
) -> None:
    engine = canary_engine(folder, enable_overlap=folder.name == "gemma")
    handles = start(engine)
    position, kind = fault.plant(engine)
    finish(engine, handles)
    outputs = [handle.output().outputs[0] for handle in handles]
    assert outputs[1].finish_reason == "error"
    check_named(outputs[1].message, "victim", position, kind)
    sound = undisturbed[folder]
    assert outputs[1].token_ids == sound[1][: len(outputs[1].token_ids)], "no wrong token left"
    for place in (0, 2):
        assert outputs[place].finish_reason == "length"
        assert outputs[place].token_ids == sound[place]
    stats = engine.stats()
    assert stats["kv_canary_sequences"] == 1
    assert stats["kv_canary_violations"] >= 1
    again = run_all(engine, PROMPTS, [GREEDY] * 3)
    assert [output.outputs[0].token_ids for output in again] == sound, "the cache held a wrong page"
    assert engine.stats()["kv_canary_sequences"] == 1


@pytest.mark.parametrize("split_layers", [None, 1], ids=["whole", "split"])
def test_a_prompt_in_chunks_reads_what_its_chunks_wrote(
    folder: Path, split_layers: int | None
) -> None:
    """Others decode meanwhile; the prompt's second chunk finds a key of the first one changed."""
    engine = canary_engine(folder, chunked_prefill_size=16, split_prefill_layers=split_layers)
    other = engine.add(PROMPTS[0], GREEDY, request_id="other")
    for _ in range(3):
        engine.step()
    victim = engine.add([(7 * index) % 256 for index in range(60)], GREEDY, request_id="victim")
    engine.step()
    while running(engine).computed < 16:
        engine.step()
    keys = engine.worker.runner.token_to_kv_pool.keys[0].flatten(0, 1)  # [slots, K, D]
    keys[slot(running(engine), 5), 0, 0] += 1
    finish(engine, [other, victim])
    output = victim.output().outputs[0]
    assert output.token_ids == []
    check_named(output.message, "victim", 5, "real KV")
    assert other.output().outputs[0].finish_reason == "length"


@pytest.mark.parametrize("real_data", ["off", "partial", "all"])
def test_how_much_of_the_data_is_looked_at(llama_folder: Path, real_data: str) -> None:
    for end in (False, True):  # the first words of a token's keys, or the last
        engine = canary_engine(llama_folder, kv_canary_real_data=real_data)
        handles = start(engine)
        keys = engine.worker.runner.token_to_kv_pool.keys[1].flatten(0, 1)  # [slots, K, D]
        place = (-1, -1) if end else (0, 0)
        keys[slot(running(engine), 11)][place] += 1
        finish(engine, handles)
        is_seen = real_data == "all" or (real_data == "partial" and not end)
        reason = handles[1].output().outputs[0].finish_reason
        assert reason == ("error" if is_seen else "length")


def test_log_tells_once_and_goes_on(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = canary_engine(llama_folder, kv_canary="log")
    handles = start(engine)
    changed_key(engine)
    with caplog.at_level(logging.ERROR, logger="headrace"):
        finish(engine, handles)
    told = [record.message for record in caplog.records if "KV canary" in record.message]
    assert len(told) == 1
    check_named(told[0], "victim", 9, "real KV")
    assert [handle.output().outputs[0].finish_reason for handle in handles] == ["length"] * 3
    assert engine.stats()["kv_canary_violations"] > 5, "every step that reads it counts"


def test_a_corrupted_prefix_leaves_the_cache(llama_folder: Path) -> None:
    prompt = list(range(20, 41))
    engine = canary_engine(llama_folder)
    (sound,) = run_all(engine, [prompt], [GREEDY])
    cache = engine.scheduler.keeper.cache
    held = cache.held_pages
    pages = [page for _, page, _ in sorted(cache.held_runs(), key=lambda run: run[2])]
    values = engine.worker.runner.token_to_kv_pool.values[0].flatten(0, 1)
    values[pages[2] * PAGE + 1, 0, 0] += 1
    handle = engine.add(prompt, GREEDY, request_id="reader")
    finish(engine, [handle])
    output = handle.output()
    assert output.cached_tokens == 20
    assert output.outputs[0].token_ids == []
    check_named(output.outputs[0].message, "reader", 2 * PAGE + 1, "real KV")
    assert cache.held_pages == 2 < held, "what stands before the page is sound"
    (again,) = run_all(engine, [prompt], [GREEDY])
    assert again.cached_tokens == 2 * PAGE
    assert again.outputs[0].token_ids == sound.outputs[0].token_ids


def test_a_page_that_others_read_is_given_back_when_they_are_done(llama_folder: Path) -> None:
    """In log mode everybody goes on; the page can be matched by nobody from then on."""
    prompt = list(range(20, 41))
    engine = canary_engine(llama_folder, kv_canary="log")
    run_all(engine, [prompt], [SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)])
    reader = engine.add(prompt, GREEDY, request_id="reader")
    for _ in range(3):
        engine.step()
    sequence = running(engine, "reader")
    page = sequence.pages[3]
    assert page not in sequence.owned
    engine.worker.runner.token_to_kv_pool.keys[0].flatten(0, 1)[page * PAGE, 0, 0] += 1
    for _ in range(2):
        engine.step()
        engine.scheduler.check_integrity()
    late = engine.add(prompt, GREEDY, request_id="late")
    finish(engine, [reader, late])
    assert late.output().cached_tokens == 3 * PAGE
    assert reader.output().outputs[0].finish_reason == "length"
    free = engine.scheduler.keeper.allocator
    assert free.is_free(page) or page not in engine.scheduler.keeper.suspect


def test_a_sweep_finds_what_nobody_reads(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = canary_engine(llama_folder, kv_canary_sweep_interval=3)
    outputs = run_all(engine, PROMPTS, [GREEDY] * 3)
    cache = engine.scheduler.keeper.cache
    assert engine.stats()["kv_canary_swept_pages"] > 0
    _, page, index = max(cache.held_runs(), key=lambda run: run[2])
    pool = engine.worker.runner.token_to_kv_pool
    pool.keys[0].flatten(0, 1)[page * PAGE + 2, 0, 0] += 1
    with caplog.at_level(logging.ERROR, logger="headrace"):
        (output,) = run_all(engine, [[5, 6, 7]], [GREEDY])
    assert output.outputs[0].finish_reason == "length"
    told = [record.message for record in caplog.records if "prefix cache" in record.message]
    assert len(told) == 1
    assert f"position {index * PAGE + 2}, slot {page * PAGE + 2} of page {page}" in told[0]
    whole = [(len(prompt) + 23) // PAGE for prompt in PROMPTS]
    tokens = [
        prompt + output.outputs[0].token_ids
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    left = [cache.peek(CacheKey(), each) // PAGE for each in tokens]
    assert index == max(whole) - 1
    assert sum(left) == sum(whole) - 1, "the last page of the longest"


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_alarm_nobody(llama_folder: Path, gemma_folder: Path, seed: int) -> None:
    """Chunks, prefix hits, several outputs, retraction, aborts, stops, overlap, page sizes."""
    draw, folder = random.Random(seed), (llama_folder, gemma_folder)[seed // 2 % 2]
    engine = canary_engine(
        folder,
        kv_canary_real_data="all",
        kv_canary_sweep_interval=2,
        page_size=[1, 2, 4, 8, 16, 32][seed],
        chunked_prefill_size=draw.choice([5, 16, 64]),
        enable_overlap=bool(seed % 2),
        enable_prefix_cache=seed != 3,
        max_running_requests=5,
        max_model_len=96,
        max_total_tokens=[100, 150, 150, 120, 160, 320][seed],
        split_prefill_layers=1 if seed in (1, 4) else None,
        retract_every=5,
    )
    stems = [[draw.randrange(256) for _ in range(draw.randint(3, 40))] for _ in range(3)]
    handles = []
    for index in range(14):
        prompt = draw.choice(stems) + [draw.randrange(256) for _ in range(draw.randint(0, 20))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=index,
            n=draw.choice([1, 1, 2]),
            max_tokens=draw.randint(1, 20),
            stop_token_ids=tuple(draw.sample(range(256), 12)),
            prompt_logprobs=draw.choice([None, None, 1]),
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
    assert stats["retractions"] > 0 or seed == 5  # a pool of few pages has no room for two


@pytest.mark.slow
def test_compiled_steps_are_watched(llama_folder: Path) -> None:
    engine = canary_engine(llama_folder, cpu_graph="on", max_running_requests=1)
    (output,) = run_all(engine, PROMPTS[:1], [GREEDY])
    assert output.outputs[0].paths[-1][0] == "cpu_graph"
    assert engine.stats()["kv_canary_violations"] == 0
    handle = engine.add(PROMPTS[1], GREEDY, request_id="victim")
    for _ in range(6):
        engine.step()
    position, kind = changed_key(engine)
    finish(engine, [handle])
    check_named(handle.output().outputs[0].message, "victim", position, kind)


def test_off_leaves_nothing_behind(llama_folder: Path) -> None:
    runner = canary_engine(llama_folder, kv_canary="off").worker.runner
    assert runner.kv_canary is None
    assert runner.arena.bytes("kv canary") == 0
    assert runner.paths.eager.ends.taps is NO_TAPS
    assert runner.observers.members == ()
    assert "kv canary" not in [line.name for line in runner.kv_budget.lines]


def test_its_bytes_are_in_the_budget(gemma_folder: Path) -> None:
    for real_data, parts in (("off", 2), ("partial", 3)):
        runner = canary_engine(gemma_folder, kv_canary_real_data=real_data).worker.runner
        places = runner.kv_budget.pages * PAGE
        asked = places * 8 * parts * 2  # two groups
        assert runner.arena.bytes("kv canary") == asked
        lines = {line.name: line.bytes for line in runner.kv_budget.lines}
        assert lines["kv canary"] == asked
        assert runner.kv_budget.bytes == lines["kv"] + asked


def test_nan_is_data_like_any_other(llama_folder: Path) -> None:
    """What padding leaves in page 0 is nobody's, and poison in unused memory alarms nobody."""
    engine = canary_engine(llama_folder, kv_canary_real_data="all")
    pool = engine.worker.runner.token_to_kv_pool
    for tensor in (pool.keys, pool.values):
        tensor.fill_(torch.nan)
    run_all(engine, PROMPTS, [GREEDY] * 3)
    assert engine.stats()["kv_canary_violations"] == 0
