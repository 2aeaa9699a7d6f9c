"""Hidden states of requests equal transformers', however their tokens were computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_cases import EVERY, MIXED, MODELS, PLAIN, Reference, asking, engine_of, prompts
from tiny_engine import run_all, run_alone

from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams


@pytest.fixture(params=list(MODELS))
def reference(
    request: pytest.FixtureRequest, state_reference: Callable[[str], Reference]
) -> Reference:
    return state_reference(request.param)


def check_all(reference: Reference, engine: Engine) -> None:
    """All at once, then again one by one over a cache that has their prompts."""
    for run in (run_all, run_alone):
        for output, params in zip(run(engine, prompts(), MIXED), MIXED, strict=True):
            reference.check(output, params)


def test_states_equal_transformers(reference: Reference) -> None:
    engine = engine_of(reference)
    check_all(reference, engine)
    assert engine.stats()["prompt_tokens_cached"] > 80  # of those that ask for output tokens only


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 7},
        {"chunked_prefill_size": 3, "page_size": 1, "enable_overlap": True},
        {"page_size": 4, "retract_every": 3, "enable_overlap": True},
        {"page_size": 1, "retract_every": 2, "chunked_prefill_size": 11},
        {"page_size": 4, "max_total_tokens": 104},
        {"enable_prefix_cache": False, "enable_overlap": True, "max_running_requests": 3},
    ],
    ids=["chunks", "small-chunks", "retraction", "chunks-retracted", "few-pages", "no-cache"],
)
def test_however_tokens_are_computed(reference: Reference, options: dict[str, Any]) -> None:
    engine = engine_of(reference, **({"max_model_len": 96} | options))
    check_all(reference, engine)
    if "retract_every" in options or "max_total_tokens" in options:
        assert engine.stats()["retractions"] > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cached_match_ends_before_the_first_state_that_is_asked(
    llama: Reference, page_size: int
) -> None:
    engine = engine_of(llama, page_size=page_size)
    prompt = prompts()[5]
    run_all(engine, [prompt], [PLAIN])
    everything, last = run_alone(engine, [prompt] * 2, [asking("all"), asking("last")])
    assert everything.cached_tokens == 0
    assert last.cached_tokens >= len(prompt) - page_size
    llama.check(everything, asking("all"))
    llama.check(last, asking("last"))


def test_continuations_of_a_request_compute_its_prompt_once(llama: Reference) -> None:
    engine = engine_of(llama, page_size=1)
    params = asking("all", EVERY, n=4)
    (output,) = run_all(engine, [prompts()[5]], [params])
    llama.check(output, params)
    assert engine.stats()["prompt_tokens"] == len(prompts()[5]) + 3  # the last token of each


def test_asking_changes_no_token(llama: Reference) -> None:
    silent = [
        SamplingParams(
            max_tokens=each.max_tokens,
            ignore_eos=True,
            seed=3,
            n=each.n,
            temperature=each.temperature,
        )
        for each in MIXED
    ]
    told = run_all(engine_of(llama), prompts(), MIXED)
    quiet = run_all(engine_of(llama), prompts(), silent)
    for ours, theirs in zip(told, quiet, strict=True):
        assert [x.token_ids for x in ours.outputs] == [x.token_ids for x in theirs.outputs]
        assert theirs.hidden_states is None


def test_steps_without_anybody_asking_launch_the_same_operators(llama: Reference) -> None:
    def operators(engine: Engine) -> list[str]:
        """Of a prompt and of some decode steps."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run_all(engine, [[1, 2, 3], [4, 5]], [PLAIN, PLAIN])
        return [event.name for event in profiler.events() if event.name.startswith("aten::")]

    untouched, asked = engine_of(llama), engine_of(llama)
    run_all(untouched, [[9, 8]], [PLAIN])
    run_all(asked, [[9, 8]], [asking("all", EVERY)])
    expected = operators(untouched)
    assert len(expected) > 200
    assert operators(asked) == expected
    assert asked.worker.runner.model.model.taps == ()
