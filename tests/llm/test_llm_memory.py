"""Pools that are small or shared: the same answers, nothing lost, refusals in time."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engine import LLAMA
from tiny_llm import (
    GREEDY,
    Reference,
    assert_nothing_is_held,
    ids,
    make_llm,
    one,
    tokens,
)

from headrace import LLM, SamplingParams
from headrace.base.errors import RequestError

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pool_for_one_and_a_half_requests(folder: Path, overlap: bool) -> None:
    # Answers are whole after a retraction, and no step is without tokens
    prompts = [ids(seed, 8) for seed in range(4)]
    expected = tokens(make_llm(folder), prompts, LONG)
    llm = make_llm(
        folder, page_size=4, max_model_len=72, max_total_tokens=72, enable_overlap=overlap
    )
    facts = []
    choose = llm.engine.worker.runner.selector.choose
    llm.engine.worker.runner.selector.choose = lambda each: facts.append(each) or choose(each)
    assert tokens(llm, prompts, LONG) == expected
    assert llm.stats()["retractions"] > 0
    assert min(each.tokens for each in facts) > 0
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_shared_prefixes_evictions_and_aborts(folder: Path, overlap: bool) -> None:
    # Pages used after they were freed would show; retracted and waiting requests are aborted
    draw = random.Random(5)
    stems = [ids(seed, 20) for seed in range(3)]
    prompts = [draw.choice(stems) + ids(100 + seed, seed % 6) for seed in range(24)]
    expected = tokens(make_llm(folder), prompts, GREEDY)
    llm = make_llm(
        folder,
        page_size=4,
        max_model_len=80,
        max_total_tokens=120,
        chunked_prefill_size=16,
        enable_overlap=overlap,
    )
    engine = llm.engine
    handles = [engine.add(prompt, GREEDY) for prompt in prompts]
    left = set()
    while not all(handle.is_finished for handle in handles):
        engine.step()
        if draw.random() < 0.2:
            handle = draw.choice(handles)
            if not handle.is_finished:
                left.add(handle.request_id)
            engine.abort([handle.request_id])
        engine.scheduler.check_integrity()
    assert 0 < len(left) < len(handles)
    for handle, full in zip(handles, expected, strict=True):
        made = handle.output().outputs[0]
        assert made.finish_reason == ("abort" if handle.request_id in left else "length")
        assert made.token_ids == full[: len(made.token_ids)]
        assert handle.request_id in left or len(made.token_ids) == 8
    assert_nothing_is_held(llm)


def test_late_and_repeated_aborts_do_nothing(llm: LLM) -> None:
    engine = llm.engine
    handle = engine.add(ids(1, 9), GREEDY)
    engine.abort(["unknown"])
    engine.step()
    engine.abort([handle.request_id, handle.request_id])
    engine.abort([handle.request_id])
    assert handle.output().outputs[0].finish_reason == "abort"
    done = llm.generate(ids(1, 9), GREEDY, use_tqdm=False)[0]
    engine.abort([done.request_id])
    assert len(one(llm, ids(1, 9), GREEDY).token_ids) == 8
    assert_nothing_is_held(llm)


def test_a_hundred_requests_of_every_ending(llm: LLM) -> None:
    # The pool filled up with pages nobody used
    weight = next(llm.engine.worker.runner.model.parameters())
    for turn in range(10):
        prompts = [ids(seed % 4, 10 + seed) for seed in range(9)]
        params = [
            replace(GREEDY, temperature=1.0, seed=turn, n=1 + seed % 2, stop_token_ids=[1, 2, 3])
            for seed in range(9)
        ]
        stream = llm.stream(ids(turn, 30), LONG)
        next(stream)
        llm.generate(prompts, params, use_tqdm=False)
        stream.close()
        if turn % 3 == 0:
            with torch.inference_mode():
                kept = weight[7].clone()
                weight[7] = float("nan")
                assert one(llm, [7, 8, 9], GREEDY).finish_reason == "error"
                weight[7] = kept
    assert {"finished_stop", "finished_length", "finished_abort", "finished_error"} <= set(
        llm.stats()
    )
    assert_nothing_is_held(llm)


def test_logits_that_are_no_numbers(llm: LLM) -> None:
    # Endless tokens of id 0; a mate in the batch and later requests are not touched
    good, bad = [8 + token % 200 for token in ids(3, 20)], [7, *ids(4, 20)]
    weight = next(llm.engine.worker.runner.model.parameters())
    with torch.inference_mode():
        kept = weight[7].clone()
        weight[7] = float("nan")
        expected = tokens(llm, good, GREEDY)[0]
        assert len(expected) == 8
        for _ in range(2):  # the second time the prompt must not come from the cache
            outputs = llm.generate([good, bad], GREEDY, use_tqdm=False)
            assert outputs[0].outputs[0].token_ids == expected
            assert outputs[1].outputs[0].finish_reason == "error"
            assert "finite" in outputs[1].outputs[0].message
            assert outputs[1].outputs[0].token_ids == []
        weight[7] = kept
    assert len(one(llm, bad, GREEDY).token_ids) == 8
    assert_nothing_is_held(llm)


def test_prompts_the_pool_can_never_hold(folder: Path) -> None:
    # They waited for ever and blocked all others; the exact boundary
    llm = make_llm(folder, max_model_len=None, max_total_tokens=64, page_size=4)
    assert llm.explain().plan.max_model_len.value == 64  # of 512: a sequence fits the pool
    for length in (57, 64, 65, 400):
        with pytest.raises(RequestError, match=f"Prompt 1: .* {length} tokens .* is 64 tokens"):
            llm.generate([ids(1, 9), [5] * length], GREEDY)
        assert len(one(llm, ids(1, 9), GREEDY).token_ids) == 8
    assert len(one(llm, [5] * 56, GREEDY).token_ids) == 8
    assert_nothing_is_held(llm)


def test_both_spellings_of_a_rope_type(tmp_path: Path, reference: Reference) -> None:
    # "type" was not honoured, and the context not extended
    found = []
    for spelling in ("type", "rope_type"):
        config = LLAMA | {
            "max_position_embeddings": 512,
            "rope_scaling": {
                spelling: "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        }
        folder = tmp_path / spelling
        folder.mkdir()
        for file in reference.folder.iterdir():
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(config))
        llm = make_llm(folder, load_format="auto", max_model_len=None)
        assert llm.explain().plan.max_model_len.value == 512
        params = replace(GREEDY, prompt_logprobs=1)
        found.append(llm.generate(ids(1, 60), params, use_tqdm=False)[0].prompt_logprobs)
    assert found[0] == found[1]
    plain = make_llm(reference.folder, load_format="auto")
    assert found[0] != plain.generate(ids(1, 60), params, use_tqdm=False)[0].prompt_logprobs
