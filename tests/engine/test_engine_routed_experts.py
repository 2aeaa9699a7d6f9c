"""Experts of the tokens of a request: one row a position, whatever batch, chunks and cache did."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from operator_recorder import as_if_on_a_gpu
from tiny_engine import make_engine, run_all, run_alone, write_checkpoint

from headrace.base.errors import RequestError
from headrace.engine.engine import Engine
from headrace.engine.expert_recorder import ExpertRecorder
from headrace.engine.outputs import RequestOutput
from headrace.request.sampling_params import SamplingParams

LAYERS, EXPERTS, CHOSEN = 2, 8, 2
NEW = 10
LENGTHS = (1, 5, 16, 17, 40, 41)
ASKS = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, return_routed_experts=True)
PLAIN = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe"), "moe")


def engine_of(folder: Path, *, retract_every: int = 0, **options: object) -> Engine:
    settings = {"enable_return_routed_experts": True}
    return make_engine(folder, retract_every=retract_every, **(settings | options))


def prompts() -> list[list[int]]:
    draw = random.Random(4)
    lists = [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]
    lists[-1][:32] = lists[-2][:32]  # what the prefix cache may share
    return lists


Truth = list[tuple[list[int], NDArray[np.int32]]]


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    """Of each prompt: all tokens, and the experts that the routers chose when these were run as one
    prompt, noted at the routers themselves."""
    engine = make_engine(folder, enable_prefix_cache=False)
    outputs = run_alone(engine, prompts(), [PLAIN] * len(LENGTHS))
    noted: list[NDArray[np.int32]] = []
    hooks = [
        layer.gate.register_forward_hook(
            lambda module, inputs, output: noted.append(output[0].numpy().astype(np.int32))
        )
        for layer in engine.worker.runner.model.moe_layers()
    ]
    found = []
    for prompt, output in zip(prompts(), outputs, strict=True):
        tokens = prompt + output.outputs[0].token_ids
        noted.clear()
        run_all(engine, [tokens[:-1]], [SamplingParams(temperature=0.0, max_tokens=1)])
        assert len(noted) == LAYERS
        found.append((tokens, np.stack(noted, axis=1)))  # [rows, L, k]
    for hook in hooks:
        hook.remove()
    return found


def check(outputs: list[RequestOutput], truth: Truth) -> None:
    for output, (tokens, experts) in zip(outputs, truth, strict=True):
        assert output.prompt_token_ids + output.outputs[0].token_ids == tokens
        routed = output.routed_experts
        assert routed is not None
        assert routed.dtype == np.int32
        assert routed.shape == (len(tokens) - 1, LAYERS, CHOSEN)
        assert np.array_equal(routed, experts)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_overlap": True},
        {"chunked_prefill_size": 7, "page_size": 4},
        {"chunked_prefill_size": 7, "enable_overlap": True},
        {"retract_every": 3, "page_size": 4, "chunked_prefill_size": 16},
        {"retract_every": 3, "page_size": 4, "chunked_prefill_size": 16, "enable_overlap": True},
        {"page_size": 8, "max_total_tokens": 128, "max_model_len": 128, "chunked_prefill_size": 32},
    ],
    ids=str,
)
def test_the_rows_are_those_of_one_prompt(folder: Path, truth, options: dict) -> None:
    engine = engine_of(folder, **options)
    check(run_all(engine, prompts(), [ASKS] * len(LENGTHS)), truth)
    if options.get("retract_every"):
        assert engine.stats()["retractions"] > 1


def test_what_is_cached_is_computed_again_for_those_who_ask(folder: Path, truth) -> None:
    engine = engine_of(folder, page_size=4)
    run_alone(engine, prompts(), [PLAIN] * len(LENGTHS))
    outputs = run_alone(engine, prompts(), [ASKS] * len(LENGTHS))
    check(outputs, truth)
    assert [output.cached_tokens for output in outputs] == [0] * len(LENGTHS)
    (again,) = run_all(engine, prompts()[-1:], [PLAIN])
    assert again.cached_tokens == 40  # others still read the cache
    assert again.routed_experts is None


def test_prefill_graphs_keep_them_too(
    folder: Path, truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a recorder that needs no GPU; what is recorded writes down padding, too."""
    as_if_on_a_gpu(monkeypatch)
    engine = engine_of(
        folder,
        prefill_graph="breakable",
        chunked_prefill_size=13,
        expert_distribution_recorder_mode="stat",
    )
    run_all(engine, prompts()[:1], [ASKS])
    recorder = ExpertRecorder(engine)
    recorder.start()
    outputs = run_all(engine, prompts(), [ASKS] * len(LENGTHS))
    check(outputs, truth)
    steps = {entry["path"] for entry in engine.stats()["paths"]}
    assert "prefill_graph" in steps
    content = torch.load(recorder.dump(str(tmp_path))["path"], weights_only=True)
    for layer, counts in enumerate(content["logical_count"]):
        chosen = np.concatenate([experts[:, layer].flatten() for _, experts in truth])
        assert counts.tolist() == np.bincount(chosen, minlength=EXPERTS).tolist()


def test_only_some_rows_ask(folder: Path, truth) -> None:
    engine = engine_of(folder, chunked_prefill_size=16, enable_overlap=True)
    params = [ASKS if place % 2 else PLAIN for place in range(len(LENGTHS))]
    outputs = run_all(engine, prompts(), params)
    check(outputs[1::2], truth[1::2])
    assert all(output.routed_experts is None for output in outputs[::2])


def test_each_continuation_has_the_prompt_and_its_own(folder: Path) -> None:
    engine = engine_of(folder, page_size=4)
    prompt = prompts()[4]
    params = SamplingParams(
        temperature=1.0, n=3, seed=5, max_tokens=6, ignore_eos=True, return_routed_experts=True
    )
    (output,) = run_all(engine, [prompt], [params])
    for each in output.outputs:
        assert each.routed_experts is not None
        tokens = prompt + each.token_ids
        (alone,) = run_all(
            engine,
            [tokens],
            [SamplingParams(temperature=0.0, max_tokens=1, return_routed_experts=True)],
        )
        assert len(each.routed_experts) == len(tokens) - 1
        assert np.array_equal(each.routed_experts, alone.routed_experts[:-1])
    own = [each.routed_experts[len(prompt) :].tolist() for each in output.outputs]
    assert own[0] != own[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_ends_the_rows_with_the_tokens(folder: Path, truth, overlap: bool) -> None:
    engine = engine_of(folder, enable_overlap=overlap)
    tokens, experts = truth[2]
    prompt, made = tokens[: LENGTHS[2]], tokens[LENGTHS[2] :]
    first = made.index(made[4])
    for stops in ({"stop_token_ids": [made[4]]}, {"max_tokens": first + 1}):
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, return_routed_experts=True, **stops
        )
        (output,) = run_all(engine, [prompt], [params])
        assert len(output.outputs[0].token_ids) == first + 1
        assert np.array_equal(output.routed_experts, experts[: len(prompt) + first])


def test_an_abort_leaves_what_there_was(folder: Path, truth) -> None:
    engine = engine_of(folder)
    tokens, experts = truth[1]
    handle = engine.add(tokens[:5], ASKS)
    engine.step()
    engine.step()
    engine.abort([handle.request_id])
    output = handle.output().outputs[0]
    assert output.finish_reason == "abort"
    assert output.routed_experts is not None
    rows = 5 + len(output.token_ids) - 1
    assert np.array_equal(output.routed_experts, experts[:rows])


def test_asked_beside_hidden_states(folder: Path, truth) -> None:
    engine = engine_of(folder, chunked_prefill_size=16)
    both = SamplingParams(
        temperature=0.0,
        max_tokens=NEW,
        ignore_eos=True,
        return_routed_experts=True,
        return_hidden_states="all",
    )
    outputs = run_all(engine, prompts(), [both] * len(LENGTHS))
    check(outputs, truth)
    assert all(len(output.hidden_states) == len(output.routed_experts) for output in outputs)


def test_without_the_option_nothing_is_kept_and_who_asks_is_told(folder: Path, tmp_path) -> None:
    engine = make_engine(folder)
    with pytest.raises(RequestError, match="enable_return_routed_experts"):
        engine.add([1, 2], ASKS)
    dense = make_engine(write_checkpoint(tmp_path / "llama", "llama"))
    with pytest.raises(RequestError, match="llama, has no experts"):
        dense.add([1, 2], ASKS)


def test_equal_routers_choose_the_first_experts(folder: Path) -> None:
    engine = engine_of(folder)
    with torch.no_grad():
        for layer in engine.worker.runner.model.moe_layers():
            layer.gate.weight.zero_()
    (output,) = run_all(engine, [[1, 2, 3]], [ASKS])
    assert (output.routed_experts == [0, 1]).all()
