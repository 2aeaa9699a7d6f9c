"""The numeric canary: silent over right steps of every path, and what it says of planted faults."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from operator_recorder import as_if_on_a_gpu
from tiny_engine import make_engine, run_all
from torch import Tensor

from headrace.base.errors import CanaryError
from headrace.engine.engine import Engine
from headrace.layers.attention import SelfAttention
from headrace.layers.mlp import GatedMLP
from headrace.layers.rope import Rotation
from headrace.observers.closeness import logit_errors, token_errors, worst, worst_times
from headrace.observers.divergence import Divergence
from headrace.observers.numeric_canary import NumericCanary
from headrace.request.sampling_params import SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=4, logprobs=2),
    SamplingParams(temperature=0.7, seed=5, max_tokens=5, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1),
]


def prompts(seed: int, lengths: tuple[int, ...] = (5, 33, 17, 60)) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def canary_of(engine: Engine) -> NumericCanary:
    members = engine.worker.runner.observers.members
    (canary,) = [member for member in members if isinstance(member, NumericCanary)]
    return canary


def watched(folder: Path, every: int = 1, **options: Any) -> Engine:
    settings = {"chunked_prefill_size": 24, "page_size": 8, "numeric_canary": every}
    return make_engine(folder, **(settings | options))


def token_ids(engine: Engine, seed: int = 0) -> list[list[int]]:
    outputs = run_all(engine, prompts(seed), PARAMS)
    assert all(output.outputs[0].finish_reason != "error" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


# ---- right steps


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_steps_raise_no_alarm_and_stay_as_they_are(
    family: str, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    as_if_on_a_gpu(monkeypatch)
    options = {"dtype": dtype, "prefill_graph": "breakable", "retract_every": 5}
    plain = token_ids(watched(folder, every=0, **options))
    engine = watched(folder, **options)
    assert token_ids(engine) == plain
    assert token_ids(engine) == plain  # with prefixes from the cache
    canary = canary_of(engine)
    stats = engine.stats()
    assert not canary.divergences
    assert canary.stats() == {"compared": stats["steps"], "diverged": 0, "left_out": 0}
    assert {entry["path"] for entry in stats["paths"]} == {"prefill_graph", "eager"}


@pytest.mark.slow  # a compiler runs for it
def test_right_steps_of_the_cpu_graph_raise_no_alarm(llama_folder: Path) -> None:
    engine = watched(llama_folder, cpu_graph="on", enable_overlap=True, max_running_requests=1)
    run_all(engine, prompts(0)[:2], PARAMS[:2])
    assert any(entry["path"] == "cpu_graph" for entry in engine.stats()["paths"])
    assert canary_of(engine).stats()["diverged"] == 0


def test_mixtures_of_experts_and_what_they_leave_are_not_disturbed(moe_folder: Path) -> None:
    asked = [SamplingParams(temperature=0.0, max_tokens=4, return_routed_experts=True)] * 4
    options = {"enable_return_routed_experts": True}
    plain = run_all(watched(moe_folder, every=0, **options), prompts(0), asked)
    engine = watched(moe_folder, **options)
    outputs = run_all(engine, prompts(0), asked)
    for output, expected in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert np.array_equal(output.routed_experts, expected.routed_experts)
    steps = engine.stats()["steps"]
    assert canary_of(engine).stats() == {"compared": steps, "diverged": 0, "left_out": 0}


def test_steps_in_parts_are_none_of_its_own(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.execution.split_prefill.LEAST_TOKENS", 8)
    engine = watched(llama_folder, split_prefill_layers=1, chunked_prefill_size=256)
    handles = [engine.add(prompts(0)[0], PARAMS[0])]
    for _ in range(2):
        engine.step()
    handles.append(engine.add(prompts(0)[3], PARAMS[0]))
    while not all(handle.is_finished for handle in handles):
        engine.step()
    paths = {entry["path"]: entry["steps"] for entry in engine.stats()["paths"]}
    assert paths["split_prefill"] == 1
    stats = canary_of(engine).stats()
    assert stats == {"compared": engine.stats()["steps"] - 1, "diverged": 0, "left_out": 0}


def test_every_nth_step_is_compared(llama_folder: Path) -> None:
    engine = watched(llama_folder, every=3)
    token_ids(engine)
    steps = engine.stats()["steps"]
    assert steps > 6
    assert engine.stats()["observers"]["numeric_canary"]["compared"] == steps // 3


def test_a_step_too_large_is_left_out_and_counted(llama_folder: Path) -> None:
    engine = watched(llama_folder, chunked_prefill_size=256, max_running_requests=4)
    canary = canary_of(engine)
    canary.most_tokens = 8
    token_ids(engine)
    stats = canary.stats()
    assert stats["left_out"] == 1
    assert stats["compared"] == engine.stats()["steps"] - 1


# ---- faults

Fault = Callable[[Engine], Any]


def in_path(engine: Engine, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replace what the path calls, and give the reference the right thing."""
    canary, right = canary_of(engine), getattr(owner, name)
    reference = canary.reference

    def with_right(batch: Any) -> Any:
        setattr(owner, name, right)
        try:
            return reference(batch)
        finally:
            setattr(owner, name, wrong)

    canary.reference = with_right
    setattr(owner, name, wrong)


def wrong_rope(engine: Engine) -> None:
    """Positions are off by one in one path."""
    apply = Rotation.apply

    def off_by_one(self: Rotation, x: Tensor) -> Tensor:
        return apply(Rotation(self.cache, self.positions + 1), x)

    in_path(engine, Rotation, "apply", off_by_one)


def wrong_eps(engine: Engine) -> None:
    norm = engine.worker.runner.model.model.layers[1].input_layernorm
    in_path(engine, norm, "eps", 0.5)  # less would drown in rounding, in half precision


def wrong_gate(engine: Engine) -> None:
    """A fused operator that forgets the gate, in the last layer."""
    mlp = engine.worker.runner.model.model.layers[1].mlp
    assert isinstance(mlp, GatedMLP)
    in_path(engine, mlp, "act", lambda x: x)


def stale_table(engine: Engine) -> None:
    """The path writes to the page that its row had before."""
    preparation = engine.worker.runner.paths.eager.ends.preparation
    fill = preparation.fill

    def stale(batch: Any) -> None:
        fill(batch)
        for group in batch.kv.values():
            group.out_cache_loc.copy_(torch.where(group.out_cache_loc > 0, 8, 0))

    preparation.fill = stale  # the reference has a preparation of its own


def wrong_window(engine: Engine) -> None:
    """Attention of layer 0 sees one key less."""
    layer = engine.worker.runner.model.attention_layers()[0]
    assert isinstance(layer, SelfAttention)
    in_path(engine, layer, "scale", layer.scale * 1.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "layer", "parts", "why"),
    [
        (wrong_rope, 0, ("K",), "The values agree"),
        (wrong_eps, 1, ("K", "V"), "Layer 0 behind its KV"),
        (wrong_gate, None, (), "All keys and values agree"),
        (stale_table, 0, ("K", "V"), "page table"),
        (wrong_window, 1, ("K", "V"), "Layer 0 behind its KV (inputs, attention"),
    ],
)
def test_a_fault_is_caught_and_named(
    fault: Fault,
    layer: int | None,
    parts: tuple[str, ...],
    why: str,
    dtype: str,
    llama_folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rotation, "apply", Rotation.apply)  # given back at the end
    engine = watched(llama_folder, chunked_prefill_size=256, dtype=dtype)
    fault(engine)
    run_all(engine, prompts(0), PARAMS)
    found = canary_of(engine).divergences[0]
    assert isinstance(found, Divergence)
    assert (found.path, found.backend, found.layer) == ("eager", "torch_native", layer)
    assert found.parts == parts
    assert found.times > (10 if dtype == "float32" else 1.5)
    assert found.sequences == tuple(f"request-{index}" for index in range(4))
    told = caplog.text
    assert "A step on eager (115 tokens, 4 rows; attention torch_native)" in told
    assert why in told
    assert "request-3" in told


def test_the_worst_token_is_named(llama_folder: Path) -> None:
    engine = watched(llama_folder, chunked_prefill_size=256)
    token = sum(len(prompt) for prompt in prompts(0)[:2]) + 7  # position 7 of the third prompt
    embed = engine.worker.runner.model.model.embed_tokens
    forward = embed.forward

    def one_wrong(ids: Tensor) -> Tensor:
        rows = forward(ids)
        if len(ids) > token:
            rows[token] = -rows[token]
        return rows

    in_path(engine, embed, "forward", one_wrong)
    run_all(engine, prompts(0), PARAMS)
    found = canary_of(engine).divergences[0]
    assert (found.sequence, found.position, found.layer) == ("request-2", 7, 0)


def test_a_step_that_diverges_fails_if_asked(llama_folder: Path) -> None:
    engine = watched(llama_folder, numeric_canary_mode="raise")
    wrong_eps(engine)
    (output,) = run_all(engine, prompts(0)[:1], PARAMS[:1])
    assert output.outputs[0].finish_reason == "error"
    assert "K and V of layer 1 differ first" in str(output.outputs[0].message)
    canary_of(engine).raises = False
    (output,) = run_all(engine, prompts(1)[:1], PARAMS[:1])  # the engine goes on
    assert output.outputs[0].finish_reason == "length"


def test_the_error_is_of_a_kind_of_its_own(llama_folder: Path) -> None:
    engine = watched(llama_folder, numeric_canary_mode="raise")
    wrong_eps(engine)
    canary = canary_of(engine)
    raised: list[BaseException] = []
    take = canary.take

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except CanaryError as error:
            raised.append(error)
            raise

    def watched_take(host: Any) -> None:
        with noted():
            take(host)

    engine.worker.runner.observers.members = (_Taking(canary, watched_take),)
    run_all(engine, prompts(0)[:1], PARAMS[:1])
    (error,) = raised
    assert isinstance(error, CanaryError)
    assert error.remedy == "Its sequences: request-0"


def test_a_dump_holds_the_step_that_was_found_wrong(llama_folder: Path, tmp_path: Path) -> None:
    engine = watched(llama_folder, numeric_canary_mode="raise")
    wrong_eps(engine)
    engine.dumper.start(str(tmp_path))
    (output,) = run_all(engine, prompts(0)[:1], PARAMS[:1])
    assert output.outputs[0].finish_reason == "error"
    assert [path.name for path in engine.dumper.stop()] == ["step-000001.safetensors"]


class _Taking:
    """An observer whose results go elsewhere."""

    def __init__(self, canary: NumericCanary, take: Callable[[Any], None]) -> None:
        self.name, self.around, self.take = canary.name, canary.around, take


# ---- the measure


def test_one_wrong_token_among_many_shows() -> None:
    torch.manual_seed(0)
    reference = torch.randn(500, 2, 8)
    real = reference.clone()
    real[321] *= 1.1
    live = torch.ones(500, dtype=torch.bool)
    error, place = map(float, worst(token_errors(real, reference, live)))
    assert place == 321
    assert error == pytest.approx(0.1, rel=0.3)
    live[321] = False
    assert not token_errors(real, reference, live).any()


def test_nan_is_infinitely_wrong_unless_the_reference_has_none_either() -> None:
    reference = torch.ones(4, 3)
    real = reference.clone()
    real[2, 1] = torch.nan
    live = torch.ones(4, dtype=torch.bool)
    errors = token_errors(real, reference, live)
    assert errors.tolist() == [0.0, 0.0, torch.inf, 0.0]
    assert worst_times(errors, torch.full((4,), 0.1)).tolist() == [torch.inf, 2.0, torch.inf]
    assert logit_errors(real, torch.randn(4, 3), live)[0][2] == torch.inf
    reference[2, 0] = torch.nan
    assert not token_errors(real, reference, live).any()


def test_a_small_token_is_held_against_the_usual_size() -> None:
    reference = torch.ones(10, 4)
    reference[3] = 1e-6
    real = reference.clone()
    real[3] += 1e-6
    assert token_errors(real, reference, torch.ones(10, dtype=torch.bool))[3] < 1e-5


def test_a_token_that_rounding_moves_far_may_differ_more() -> None:
    errors, allowed = torch.tensor([0.2, 0.05, 0.1]), torch.tensor([0.4, 0.01, 0.2])
    times, place, error = worst_times(errors, allowed).tolist()
    assert (times, place, error) == (pytest.approx(5), 1, pytest.approx(0.05))


def test_one_wrong_logit_shows_in_the_single_ones() -> None:
    torch.manual_seed(0)
    reference = torch.randn(3, 1000)
    real = reference.clone()
    real[1, 999] += 5
    found = logit_errors(real, reference, torch.ones(3, dtype=torch.bool))
    assert [int(each.argmax()) for each in found] == [1, 1, 1]
    assert float(found[0][1]) == pytest.approx(5 / 1000**0.5, rel=0.1)
    assert float(found[1][1]) == pytest.approx(5, rel=0.1)
    assert float(found[2][1]) == pytest.approx(5)
