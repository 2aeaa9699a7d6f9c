"""Without an observer a step calls the operators of an engine that knows none, and no other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_engine import make_engine, run_all
from torch.profiler import ProfilerActivity, profile

from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import ModelRunnerOutput
from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams
from headrace.runner.model_runner import ModelRunner

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=3, ignore_eos=True, logprobs=2),
]


def operators(engine: Engine) -> list[str]:
    """Names of all operators of a run, in their order."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run_all(engine, PROMPTS, PARAMS)
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events]


class NothingWatched:
    """In place of `Observers`, for the code that takes results."""

    def take(self, host: Any) -> None:
        assert not host


@torch.inference_mode()
def forward(runner: ModelRunner, batch: ForwardBatch) -> ModelRunnerOutput:
    """A runner that has never heard of observers."""
    runner.selector.make_ready(batch.facts)
    choice = runner.selector.choose(batch.facts)
    return ModelRunnerOutput(
        logits_output=choice.path.run(batch, choice.bucket),
        path=choice.path.name,
        bucket=choice.bucket,
        refused=choice.refused,
    )


@contextmanager
def without_observers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    runner: Any = engine.worker.runner
    runner.observers = NothingWatched()
    none: Any = SimpleNamespace(before=lambda batch: None, after=lambda batch: None)
    runner.paths.eager.ends = replace(runner.paths.eager.ends, taps=none)
    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "forward", forward)
        yield engine


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_without_an_observer_no_operator_is_called_for_one(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = request.getfixturevalue(f"{family}_folder")
    options = {"enable_prefix_cache": False, "chunked_prefill_size": 4}
    run_all(make_engine(folder, **options), PROMPTS, PARAMS)  # what only a first run does
    with without_observers(make_engine(folder, **options), monkeypatch) as engine:
        expected = operators(engine)
    assert len(expected) > 500
    assert operators(make_engine(folder, **options)) == expected
    # and a comparison that could not fail would prove nothing
    assert len(operators(make_engine(folder, numeric_canary=2, **options))) > len(expected)


def test_watching_that_has_ended_leaves_nothing_behind(llama_folder: Path, tmp_path: Path) -> None:
    engine = make_engine(llama_folder, enable_prefix_cache=False)
    expected = operators(engine)
    engine.dumper.start(str(tmp_path / "dump"), names=("k", "v", "stream", "logits"))
    watched = operators(engine)
    engine.settle()
    engine.dumper.stop()
    assert len(watched) > len(expected)
    assert operators(engine) == expected
    engine.profiler.start(str(tmp_path), steps=1)
    run_all(engine, PROMPTS, PARAMS)
    assert operators(engine) == expected
