"""Split prefill: equal to the whole, and others decode between its parts."""

import random
from pathlib import Path
from typing import Any

import pytest
from same_answer import Comparison
from tiny_engine import make_engine, run_all, run_alone

import headrace.execution.split_prefill as split_prefill
from headrace.base.errors import ConfigError
from headrace.engine.engine import Engine
from headrace.engine.requests import RequestHandle
from headrace.execution.split_prefill import LEAST_TOKENS
from headrace.request.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SCORED = SamplingParams(
    temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1
)


@pytest.fixture(scope="module", params=["llama", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts are split too."""
    monkeypatch.setattr(split_prefill, "LEAST_TOKENS", 2)


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def beside_a_decoding_one(engine: Engine) -> RequestHandle:
    handle = engine.add([7, 8, 9], LONG)
    while not handle.output_tokens:
        engine.step()
    return handle


def steps_of(engine: Engine, path: str) -> int:
    return sum(each["steps"] for each in engine.stats()["paths"] if each["path"] == path)


LENGTHS = (1, 5, 17, 64, 100, 33, 90, 48)
PARAMS = [GREEDY if index % 4 else SCORED for index in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Comparison:
    """Prompts of `LENGTHS` alone, unsplit."""
    engine = make_engine(folder, enable_prefix_cache=False)
    return Comparison(run_alone(engine, prompts_of(*LENGTHS), PARAMS))


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("layers", "options"), [
    (1, {}),
    (2, {"chunked_prefill_size": 32, "page_size": 4}),
    (1, {"retract_every": 5, "page_size": 4, "chunked_prefill_size": 24}),
    (1, {"max_total_tokens": 320, "page_size": 8}),
])  # fmt: skip
def test_equal_to_the_whole(
    folder: Path, whole: Comparison, layers: int, options: dict[str, Any], overlap: bool
) -> None:
    engine = make_engine(folder, split_prefill_layers=layers, enable_overlap=overlap, **options)
    beside_a_decoding_one(engine)
    handles = []
    for prompt, each in zip(prompts_of(*LENGTHS), PARAMS, strict=True):
        handles.append(engine.add(prompt, each))
        for _ in range(3):
            engine.step()
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    whole.check([handle.output() for handle in handles])
    assert steps_of(engine, "split_prefill") >= 3
    assert any("split_prefill" in dict(handle.output().paths) for handle in handles)


@pytest.mark.parametrize("overlap", [False, True])
def test_others_get_a_token_between_two_parts(folder: Path, overlap: bool) -> None:
    engine = make_engine(folder, split_prefill_layers=1, max_model_len=512, enable_overlap=overlap,
                         chunked_prefill_size=512)  # fmt: skip
    layers = len(engine.worker.runner.model.model.layers)
    other = beside_a_decoding_one(engine)
    before = other.output_tokens
    prompt = engine.add(prompts_of(LEAST_TOKENS + 50)[0], GREEDY)
    while not prompt.output_tokens:
        engine.step()
    # One token in the turn that begins, one in every turn that a part takes but the last.
    got = other.output_tokens - before
    assert got >= layers, f"{got} tokens beside {layers} layers"
    assert dict(prompt.paths(0))["split_prefill"] == 1
    while engine.has_work:
        engine.step()


def test_short_prompts_and_lone_ones_run_whole(folder: Path) -> None:
    engine = make_engine(folder, split_prefill_layers=1, max_model_len=512)
    run_all(engine, prompts_of(LEAST_TOKENS + 50), [GREEDY])
    beside_a_decoding_one(engine)
    engine.add(prompts_of(LEAST_TOKENS - 1)[0], GREEDY)
    while engine.has_work:
        engine.step()
    assert steps_of(engine, "split_prefill") == 0
    refused = "; ".join(each["refused"] for each in engine.stats()["paths"])
    assert "split_prefill: nobody decodes beside a prompt" in refused


@pytest.mark.usefixtures("any_length")
def test_what_is_aborted_between_two_parts_goes_no_further(folder: Path) -> None:
    engine = make_engine(folder, split_prefill_layers=1)
    other = beside_a_decoding_one(engine)
    prompt = engine.add(prompts_of(80)[0], GREEDY)
    engine.step()
    assert engine.scheduler.splits.in_flight is not None
    engine.abort([prompt.request_id])
    assert engine.scheduler.splits.in_flight is None
    assert prompt.output().outputs[0].finish_reason == "abort"
    while engine.has_work:
        engine.step()
    assert other.output().outputs[0].finish_reason == "length"
    engine.scheduler.check_integrity()


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("call", ["begin_split", "advance_split"])
def test_a_part_that_raises_ends_its_own_sequences_only(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, split_prefill_layers=1)
    other = beside_a_decoding_one(engine)

    def fail(*given: Any) -> None:
        raise ZeroDivisionError("a part that raises")

    prompt = engine.add(prompts_of(80)[0], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.worker, call, fail)
        while not prompt.is_finished:
            engine.step()
    failed = prompt.output().outputs[0]
    assert (failed.finish_reason, "a part that raises" in failed.message) == ("error", True)
    again = engine.add(prompts_of(80)[0], GREEDY)
    while engine.has_work:
        engine.step()
    assert other.output().outputs[0].finish_reason == "length"
    assert again.output().outputs[0].finish_reason == "length"
    engine.scheduler.check_integrity()


def test_layers_are_counted_from_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="split_prefill_layers"):
        make_engine(folder, split_prefill_layers=0)


def test_plan_tells_the_parts(folder: Path) -> None:
    engine = make_engine(folder, split_prefill_layers=2)
    decision = engine.worker.runner.plan.split_prefill_layers
    assert decision.asked
    assert decision.value == 2
    assert "parts" in decision.reason
