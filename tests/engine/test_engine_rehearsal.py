"""A rehearsal foresees the very steps that the engine then takes, whatever requests ask for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import make_engine, run_all, write_checkpoint

from headrace.batch.facts import BatchFacts
from headrace.engine.engine import Engine
from headrace.engine.rehearsal import DryRequest, _DryWorker, rehearse
from headrace.request.sampling_params import SamplingParams

Steps = list[BatchFacts]


def both(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    patch: pytest.MonkeyPatch,
) -> tuple[Steps, Steps]:
    """The steps that are foreseen, and those that are taken."""
    ahead: Steps = []
    steps: Steps = []
    take, finish = _DryWorker._take, engine.worker._finish
    patch.setattr(
        _DryWorker, "_take", lambda worker, facts: noted(ahead, facts, take, worker, facts)
    )
    patch.setattr(
        engine.worker, "_finish", lambda out, batch: noted(steps, batch.facts, finish, out, batch)
    )
    rehearse(engine, list(map(DryRequest.of, [engine] * len(prompts), prompts, params)))
    assert not steps
    run_all(engine, prompts, params)
    return ahead, steps


def noted(steps: Steps, facts: BatchFacts, function: Callable[..., Any], *arguments: Any) -> Any:
    steps.append(facts)
    return function(*arguments)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"return_hidden_states": "all", "return_routed_experts": True},
        {"return_hidden_states": "last", "n": 3},
        {"prompt_logprobs": 0},
        {"n": 3, "temperature": 0.0},
    ],
    ids=str,
)
def test_what_is_retracted_computes_again_what_it_would(
    tmp_path: Path, asked: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        write_checkpoint(tmp_path, "moe"),
        enable_return_routed_experts=True,
        page_size=4,
        max_total_tokens=64,
        max_model_len=48,
        chunked_prefill_size=16,
        enable_overlap=overlap,
    )
    prompts = [[index + 3] * 20 for index in range(4)]
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **asked)] * len(prompts)
    ahead, steps = both(engine, prompts, params, monkeypatch)
    assert ahead == steps
    assert engine.stats()["retractions"] > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_others_decode_between_the_parts_of_a_prompt(
    llama_folder: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        llama_folder,
        cpu_graph="off",
        split_prefill_layers=1,
        max_running_requests=2,
        max_model_len=400,
        enable_overlap=overlap,
    )
    prompts = [[1] * 5, [2] * 5, [3] * 300]
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in (20, 6, 5)]
    ahead, steps = both(engine, prompts, params, monkeypatch)
    assert ahead == steps
    assert [each.split for each in steps].count(True) == 1


def test_a_rehearsal_that_fails_says_so(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama_folder, cpu_graph="off")

    def explain(facts: BatchFacts) -> None:
        raise ZeroDivisionError("a path that cannot tell")

    monkeypatch.setattr(engine.worker.runner, "explain", explain)
    with pytest.raises(AssertionError, match="a path that cannot tell"):
        rehearse(engine, [DryRequest.of(engine, [1, 2], SamplingParams())])
