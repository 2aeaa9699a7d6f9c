"""Logprobs are those of the model, for prompts and outputs, on every way a prompt can go."""

import math
from typing import Any

import pytest
import torch
from tiny_engine import VOCAB
from tiny_llm import PRINTABLE, Reference, ids, joined, make_llm, one

from headrace import LLM, SamplingParams
from headrace.layers import logits as logits_module
from headrace.request.outcome import Logprob

CLOSE = 1e-4
PROMPT = [*ids(1, 32), 65]  # it ends with a whole character


def llm_of(reference: Reference, **options: Any) -> LLM:
    return make_llm(reference.folder, **({"load_format": "auto"} | options))


def check_prompt_logprobs(
    entries: list[dict[int, Logprob] | None] | None,
    prompt: list[int],
    truth: torch.Tensor,
    top: int,
) -> None:
    """Every entry against the direct computation: values, ranks, members, length."""
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for place, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        row, token = truth[place - 1], prompt[place]
        assert set(row.topk(top).indices.tolist()) | {token} == set(entry)
        for each, logprob in entry.items():
            assert abs(logprob.logprob - row[each].item()) < CLOSE
            assert logprob.rank == 1 + int((row > row[each]).sum())


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 100])
def test_prompt_logprobs_are_those_of_the_model(reference: Reference, length: int) -> None:
    # Twice for the cache, in chunks; as many entries as tokens
    prompt = ids(length, length)
    truth = reference.logprobs(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3, logprobs=1)
    for chunk, overlap in ((7, True), (16, False), (512, True)):
        llm = llm_of(reference, chunked_prefill_size=chunk, enable_overlap=overlap)
        for _ in range(2):
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            check_prompt_logprobs(output.prompt_logprobs, prompt, truth, 3)
            assert len(output.outputs[0].logprobs) == 1


def test_a_retracted_prompt_is_scored_whole(reference: Reference) -> None:
    # The prompt loses its pages in the middle and is computed again.
    llm = llm_of(
        reference, page_size=4, max_model_len=64, max_total_tokens=64, chunked_prefill_size=2
    )
    prompts = [ids(1, 8), ids(2, 40)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats()["retractions"] > 0
    truth = reference.logprobs(prompts[1])
    check_prompt_logprobs(outputs[1].prompt_logprobs, prompts[1], truth, 1)
    assert outputs[0].prompt_logprobs is None


def test_scored_and_plain_prompts_share_a_batch(reference: Reference) -> None:
    llm = llm_of(reference, chunked_prefill_size=11)
    prompts = [ids(seed, 20 + seed) for seed in range(4)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=top)
        for top in (0, None, 2, 4)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert outputs[1].prompt_logprobs is None
    for place, top in ((0, 0), (2, 2), (3, 4)):
        truth = reference.logprobs(prompts[place])
        check_prompt_logprobs(outputs[place].prompt_logprobs, prompts[place], truth, top)


def test_a_long_prompt_is_scored_in_slices(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Logits of all prompt tokens at once are outside every memory budget.
    llm = llm_of(reference)
    monkeypatch.setattr(logits_module, "SLICE_BYTES", 4 * VOCAB * 10)
    model = llm.engine.worker.runner.model
    compute, sizes = model.compute_logits, []

    def measured(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(model, "compute_logits", measured)
    prompt = ids(9, 100)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert max(sizes) == 10
    check_prompt_logprobs(output.prompt_logprobs, prompt, reference.logprobs(prompt), 1)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_output_logprobs_are_those_of_the_model(
    reference: Reference, temperature: float, mode: str
) -> None:
    # Raw ones do not see the temperature, processed ones do; mates change nothing
    llm = llm_of(reference)
    params = SamplingParams(
        temperature=temperature,
        seed=4,
        max_tokens=10,
        ignore_eos=True,
        logprobs=3,
        logprobs_mode=mode,
        logprob_token_ids=[5, 200],
    )
    mates = [ids(seed, 9 + seed) for seed in range(7)]
    for prompts in ([PROMPT], [*mates, PROMPT]):
        output = llm.generate(prompts, params, use_tqdm=False)[-1].outputs[0]
        scale = temperature if mode == "processed" and temperature else 1.0
        logits = reference.logits([*PROMPT, *output.token_ids]) / scale
        truth = logits.log_softmax(-1)[len(PROMPT) - 1 :]
        assert len(output.logprobs) == len(output.token_ids) == 10
        total = 0.0
        for row, token, entry in zip(truth, output.token_ids, output.logprobs, strict=False):
            assert set(entry) == {*row.topk(3).indices.tolist(), token, 5, 200}
            for each, logprob in entry.items():
                assert abs(logprob.logprob - row[each].item()) < CLOSE
                assert logprob.rank == 1 + int((row > row[each]).sum())
            total += entry[token].logprob
        assert math.isclose(output.cumulative_logprob, total)


def test_filters_show_in_processed_logprobs_only(reference: Reference) -> None:
    # Logprobs taken behind the filters are 0.0 for every greedy token.
    llm = llm_of(reference)
    row = reference.logprobs(PROMPT)[-1]
    options: dict[str, Any] = {"top_k": 3, "seed": 1, "max_tokens": 1, "logprobs": 5}
    raw = one(llm, PROMPT, SamplingParams(**options)).logprobs[0]
    for token, entry in raw.items():
        assert abs(entry.logprob - row[token].item()) < CLOSE
    processed = one(llm, PROMPT, SamplingParams(**options, logprobs_mode="processed")).logprobs[0]
    kept = row.topk(3).values.log_softmax(-1).tolist()
    shown = sorted((entry.logprob for entry in processed.values()), reverse=True)
    assert shown[:3] == pytest.approx(kept, abs=CLOSE)
    assert shown[3:] == [-math.inf] * 2


def test_penalties_reach_what_they_should(reference: Reference) -> None:
    # Repetition counts the prompt, presence and frequency do not.
    llm = llm_of(reference)
    prompt = [7, 9] * 4
    logits = reference.logits(prompt)[-1]
    plain = logits.log_softmax(-1)
    options: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 1,
        "logprobs": 0,
        "logprobs_mode": "processed",
        "logprob_token_ids": [7, 9, 30],
    }
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        entry = one(llm, prompt, SamplingParams(**options, **penalty)).logprobs[0]
        for token in (7, 9, 30):
            assert abs(entry[token].logprob - plain[token].item()) < CLOSE
    entry = one(llm, prompt, SamplingParams(**options, repetition_penalty=2.0)).logprobs[0]
    for token in (7, 9):
        logits[token] = logits[token] / 2 if logits[token] > 0 else logits[token] * 2
    for token in (7, 9, 30):
        assert abs(entry[token].logprob - logits.log_softmax(-1)[token].item()) < CLOSE


def test_named_ids_alone_bring_logprobs(llm: LLM) -> None:
    output = one(llm, PROMPT, SamplingParams(max_tokens=3, seed=0, logprob_token_ids=[5]))
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert set(entry) == {token, 5}
    assert one(llm, PROMPT, SamplingParams(max_tokens=3, seed=0)).logprobs is None
    assert one(llm, PROMPT, SamplingParams(max_tokens=3, seed=0)).cumulative_logprob is None


def test_logprobs_of_a_stream_are_those_of_the_output(llm: LLM) -> None:
    # Neither copied nor cumulative from piece to piece, and aligned with the text
    params = SamplingParams(
        seed=8, max_tokens=20, ignore_eos=True, logprobs=3, allowed_token_ids=PRINTABLE
    )
    output = one(llm, PROMPT, params)
    pieces = list(llm.stream(PROMPT, params))
    assert all(len(piece.logprobs or []) == len(piece.token_ids) for piece in pieces)
    text, token_ids, logprobs = joined(pieces)
    assert (text, token_ids, logprobs) == (output.text, output.token_ids, output.logprobs)
    decoded = [entry[token].decoded_token for token, entry in zip(token_ids, logprobs, strict=True)]
    assert "".join(decoded) == text


def test_a_stream_brings_the_prompts_logprobs_once(llm: LLM) -> None:
    params = SamplingParams(seed=8, max_tokens=6, ignore_eos=True, prompt_logprobs=1, n=2)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    brought = [piece for piece in llm.stream(PROMPT, params) if piece.prompt_logprobs is not None]
    assert len(brought) == 1
    assert brought[0].index == 0
    assert brought[0].prompt_logprobs == output.prompt_logprobs
