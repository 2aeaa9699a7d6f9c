"""Prompts that begin in a step, by torch's causal attention: torch_native and cudnn."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.attention import cudnn_backend, torch_native
from headrace.attention.backend import AttentionBackend
from headrace.attention.cudnn_backend import CudnnBackend
from headrace.attention.fresh import FreshRun, fresh_attention, fresh_runs, read_slots, run_slots
from headrace.attention.torch_native import TorchNativeBackend
from headrace.batch.forward_mode import ForwardMode
from headrace.config.hardware import assumed_hardware
from headrace.kernels.support_triton import triton_available
from headrace.testing.attention import check_attention_backend
from headrace.testing.paged_batches import Case, Scene, make_batch, make_scene, run

needs_triton = pytest.mark.skipif(
    triton_available("cpu") is not None, reason="needs Triton's interpreter"
)
KINDS = [TorchNativeBackend, pytest.param(CudnnBackend, marks=needs_triton)]
EQUAL = Case(rows=[(0, 20)] * 3, heads=(6, 2))
RAGGED = Case(rows=[(0, 5), (0, 20), (0, 20), (0, 1), (0, 33)], page_size=8)


def runs_of(case: Case, first: int = 0) -> tuple[FreshRun, ...] | None:
    return fresh_runs(make_batch(case, torch.zeros(len(case.rows), 9, dtype=torch.int32)), first)


def test_runs_are_rows_of_one_length_side_by_side() -> None:
    runs = runs_of(RAGGED)
    assert runs is not None
    assert [(each.row, each.rows, each.length) for each in runs] == [
        (0, 1, 5),
        (1, 2, 20),
        (3, 1, 1),
        (4, 1, 33),
    ]
    tokens = torch.arange(RAGGED.tokens)
    assert torch.cat([tokens[each.tokens] for each in runs]).equal(tokens)
    assert runs_of(Case(rows=[(40, 1), (0, 3), (0, 3)]), first=1) == (
        FreshRun(row=1, rows=2, length=3, start=1),
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(rows=[(0, 5), (1, 4)]),
        Case(rows=[(0, 5)], padding=2),
        Case(rows=[(0, 1)], decode=True),
    ],
)
def test_what_is_not_fresh(case: Case) -> None:
    assert runs_of(case) is None


def test_warm_up_is_not_fresh() -> None:
    batch = make_batch(EQUAL, torch.zeros(3, 9, dtype=torch.int32))
    batch.facts = replace(batch.facts, live_tokens=0)
    assert fresh_runs(batch) is None


@pytest.mark.parametrize("heads_first", [False, True])
def test_slots_of_a_run_hold_its_keys(heads_first: bool) -> None:
    scene = make_scene(RAGGED)
    keys, _ = scene.layer.pool.key_value(0)
    if heads_first:
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    for each in fresh_runs(scene.batch) or ():
        found = read_slots(keys, run_slots(each, scene.batch.kv["full"]))
        assert torch.equal(found, scene.fresh[0][each.tokens])


class Calls:
    """Counts the calls of `fresh_attention` of a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.runs: list[FreshRun] = []
        monkeypatch.setattr(module, "fresh_attention", self)

    def __call__(self, q: Any, k: Any, v: Any, each: FreshRun, scale: float) -> torch.Tensor:
        self.runs.append(each)
        return fresh_attention(q, k, v, each, scale)


def module_of(kind: type[AttentionBackend]) -> Any:
    return cudnn_backend if kind is CudnnBackend else torch_native


def agree(scene: Scene, out: torch.Tensor) -> None:
    assert out.shape == scene.expected.shape
    torch.testing.assert_close(
        out[scene.live].double(), scene.expected[scene.live], rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_one_length_are_one_call(
    kind: type[AttentionBackend],
    heads: tuple[int, int],
    given: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without fresh keys and a given output."""
    calls = Calls(monkeypatch, module_of(kind))
    scene = make_scene(replace(EQUAL, heads=heads))
    backend = scene.backend(kind)
    backend.prepare_metadata(scene.batch)
    out = torch.full_like(scene.q, torch.nan) if given else None
    kv = scene.fresh if given else None
    result = backend.forward(scene.q, scene.layer, scene.batch, kv=kv, out=out)
    assert out is None or result is out
    agree(scene, result)
    assert calls.runs == [FreshRun(row=0, rows=3, length=20, start=0)]


def test_torch_native_calls_once_per_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, torch_native)
    scene = make_scene(RAGGED)
    agree(scene, run(scene, scene.backend(TorchNativeBackend))[0])
    assert len(calls.runs) == 4
    monkeypatch.setitem(torch_native.RUN_TOKENS, "cpu", 30)  # 79 tokens are too few for four
    agree(scene, run(scene, scene.backend(TorchNativeBackend))[0])
    assert len(calls.runs) == 4


@needs_triton
def test_cudnn_leaves_the_decode_rows_in_front_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, cudnn_backend)
    scene = make_scene(Case(rows=[(40, 1), (9, 1), (0, 6), (0, 6)]))
    assert scene.batch.mode is ForwardMode.MIXED
    agree(scene, run(scene, scene.backend(CudnnBackend))[0])
    assert calls.runs == [FreshRun(row=2, rows=2, length=6, start=2)]


@pytest.mark.parametrize(
    "case",
    [
        replace(EQUAL, window=7),
        replace(EQUAL, soft_cap=2.0),
        replace(EQUAL, sinks=True),
        replace(EQUAL, rows=[(0, 20), (3, 20)]),
        replace(EQUAL, padding=3),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_goes_the_other_way(
    kind: type[AttentionBackend], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, module_of(kind))
    scene = make_scene(case)
    agree(scene, run(scene, scene.backend(kind))[0])
    assert run(scene, scene.backend(kind))[0].isfinite().all()
    assert calls.runs == []


@needs_triton
def test_cudnn_leaves_ragged_prompts_and_lse_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, cudnn_backend)
    ragged, equal = make_scene(RAGGED), make_scene(EQUAL)
    agree(ragged, run(ragged, ragged.backend(CudnnBackend))[0])
    agree(equal, run(equal, equal.backend(CudnnBackend), with_lse=True)[0])
    assert calls.runs == []


def test_fresh_keys_of_another_dtype_than_the_pool_are_not_taken() -> None:
    """A later chunk sees what the pool has rounded, so the first must as well."""
    scene = make_scene(replace(EQUAL, kv_dtype=torch.float16))
    backend = scene.backend(TorchNativeBackend)
    backend.prepare_metadata(scene.batch)
    wrong = tuple(torch.zeros_like(part, dtype=torch.float32) for part in scene.fresh)
    agree(scene, backend.forward(scene.q, scene.layer, scene.batch, kv=(wrong[0], wrong[1])))


@needs_triton
def test_cudnn_keeps_every_claim() -> None:
    check_attention_backend(CudnnBackend, "cpu", thorough=False).check()


def test_cudnn_needs_triton_as_well() -> None:
    bare = replace(assumed_hardware("h100"), packages=frozenset())
    (refusal,) = [each for each in [CudnnBackend.unavailable(bare)] if each is not None]
    assert "Triton" in refusal.reason
