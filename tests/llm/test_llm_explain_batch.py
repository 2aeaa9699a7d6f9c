"""`LLM.explain(prompts, params)`: the steps that `generate` then takes, and nothing touched."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from operator_recorder import as_if_on_a_gpu
from tiny_llm import ids, make_llm

from headrace import LLM, SamplingParams
from headrace.base.errors import RequestError
from headrace.batch.facts import BatchFacts
from headrace.execution.selector import Selector
from headrace.request.structured_output import StructuredOutput


def params(tokens: int = 9, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)


def told(llm: LLM, prompts: Any, asked: Any) -> list[tuple[str, int, str]]:
    """(kind, steps, path)"""
    steps = llm.explain(prompts, asked).steps
    return [(each.kind, each.steps, each.path) for each in steps]


def taken(llm: LLM, prompts: Any, asked: Any, patch: pytest.MonkeyPatch) -> list[Any]:
    """What `generate` took, in the same form."""
    steps: list[list[Any]] = []
    original = Selector.choose

    def choose(self: Selector, facts: BatchFacts) -> Any:
        choice = original(self, facts)
        kind, path = facts.mode.name.lower(), choice.path.name
        if steps and (steps[-1][0], steps[-1][2]) == (kind, path):
            steps[-1][1] += 1
        else:
            steps.append([kind, 1, path])
        return choice

    with patch.context() as context:
        context.setattr(Selector, "choose", choose)
        llm.generate(prompts, asked, use_tqdm=False)
    return [tuple(each) for each in steps]


MANY = [ids(1, 100), ids(2, 3), *[ids(seed, 20) for seed in range(3, 13)]]


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_those_of_generate(
    folder: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(
        folder,
        chunked_prefill_size=64,
        max_running_requests=4,
        enable_overlap=overlap,
        enable_prefix_cache=False,
    )
    asked = [params(5 + index % 4, n=1 + index % 2) for index in range(len(MANY))]
    foreseen = told(llm, MANY, asked)
    assert foreseen == taken(llm, MANY, asked, monkeypatch)
    assert {kind for kind, _, _ in foreseen} == {"extend", "mixed", "decode"}


def test_a_pool_too_small_retracts_as_it_would(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(folder, max_total_tokens=64, max_model_len=64, page_size=4)
    prompts, asked = [ids(seed, 16) for seed in range(4)], [params(12)] * 4
    assert told(llm, prompts, asked) == taken(llm, prompts, asked, monkeypatch)
    assert llm.stats()["retractions"] > 0


def test_what_a_step_would_make_ready_first_is_not_made_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_a_gpu(monkeypatch)
    llm = make_llm(folder, prefill_graph="breakable", chunked_prefill_size=64)
    before = llm.stats()
    explanation = llm.explain(ids(1, 100), params())
    extend, decode = explanation.steps
    assert (extend.path, extend.prepares, extend.steps) == ("prefill_graph", True, 2)
    assert (decode.path, decode.prepares, decode.steps) == ("eager", False, 8)
    assert explanation.why_not("prefill_graph") == {"the step holds no prompt tokens": 8}
    assert llm.stats() == before
    path = llm.engine.worker.runner.paths.prefill_graph
    assert path is not None
    assert not path.prepare().seconds
    assert taken(llm, ids(1, 100), params(), monkeypatch) == told(llm, ids(1, 100), params())
    assert not llm.explain(ids(1, 100), params()).steps[0].prepares
    assert path.prepare().seconds


def test_options_of_requests_reach_the_predicates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(folder)
    seen: list[BatchFacts] = []
    runner = llm.engine.worker.runner
    explain = runner.explain

    def watched(facts: BatchFacts) -> Any:
        seen.append(facts)
        return explain(facts)

    monkeypatch.setattr(runner, "explain", watched)
    llm.explain(ids(1, 5), params(3, logprobs=2, prompt_logprobs=1, top_k=4))
    assert [facts.prompt_logprobs for facts in seen] == [True, False, False]
    assert all(facts.logprobs and not facts.host_mask for facts in seen)
    seen.clear()
    llm.explain(ids(1, 5), params(3, structured=StructuredOutput(regex="a+"), stop_token_ids=[2]))
    assert all(facts.host_mask for facts in seen)


def test_text_and_json_tell_all(folder: Path) -> None:
    llm = make_llm(folder, chunked_prefill_size=64)
    explanation = llm.explain([ids(1, 100), ids(2, 3)], params())
    lines = str(explanation).splitlines()
    assert lines[0] == "2 extend steps of 1 to 2 sequences, 39 to 64 tokens: eager"
    assert lines[-1].startswith("no step: cpu_graph: ")
    data = json.loads(json.dumps(explanation.as_dict()))
    assert data["complete"]
    assert sum(each["steps"] for each in data["steps"]) == 2 + 8
    assert data["steps"][0]["refused"][0]["path"] == "decode_graph"


def test_very_long_ones_are_told_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.rehearsal.MOST_STEPS", 10)
    explanation = make_llm(folder).explain(ids(1, 5), params(100))
    assert not explanation.complete
    assert sum(each.steps for each in explanation.steps) == 10
    assert "and more: these are the first 10" in str(explanation)


def test_what_generate_refuses_is_refused(folder: Path) -> None:
    llm = make_llm(folder)
    with pytest.raises(RequestError, match="Prompt 1: The prompt has 400 tokens"):
        llm.explain([ids(1, 5), ids(1, 400)], params())
    with pytest.raises(RequestError, match="No prompt"):
        llm.explain([], params())
    with pytest.raises(RequestError, match="sampling_params came without prompts"):
        llm.explain(None, params())  # type: ignore[call-overload]
    endless = params(3, structured=StructuredOutput(regex="a+"))
    with pytest.raises(RequestError, match="needs a token that ends the answer"):
        llm.explain(ids(1, 5), endless)


def test_a_path_that_there_is_not_is_refused(folder: Path) -> None:
    explanation = make_llm(folder).explain(ids(1, 5), params())
    assert explanation.why_not("eager") == {}
    for path in ("graph", 3, np.array(["eager", "x"])):
        with pytest.raises(RequestError, match=r"There is no path .* Use cpu_graph, decode_graph"):
            explanation.why_not(path)  # type: ignore[arg-type]
