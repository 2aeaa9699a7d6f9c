"""Mixed steps of the Triton backend: the decode rows in front go through the decode kernel."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.attention import triton_backend
from headrace.attention.triton_backend import TritonBackend
from headrace.batch.forward_mode import ForwardMode
from headrace.kernels.support_triton import triton_available
from headrace.testing.paged_batches import Case, Scene, make_scene

pytestmark = pytest.mark.skipif(
    triton_available("cpu") is not None, reason="needs Triton's interpreter"
)

CASES = [
    Case(rows=[(40, 1), (0, 1), (16, 1), (9, 7), (5, 1)], ended=frozenset({0, 2})),
    Case(rows=[(70, 1), (30, 20)], page_size=1, window=16, sinks=True, heads=(9, 3)),
    Case(rows=[(33, 1), (17, 1)], page_size=64, soft_cap=2.0, padding=2),
    Case(rows=[(0, 3), (40, 1)], dims=(16, 48), ended=frozenset({1})),
]


def attend(
    scene: Scene, backend: TritonBackend, mode: ForwardMode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, written over 42."""
    scene.batch.mode = mode
    out = scene.q.new_full(scene.expected.shape, 42.0)
    lse = torch.full(scene.expected_lse.shape, 42.0)
    backend.prepare_metadata(scene.batch)
    assert backend.forward(scene.q, scene.layer, scene.batch, out=out, lse=lse) is out
    return out, lse


def spy(make: Callable[..., Any], lengths: int, calls: list[tuple[int, int]]) -> Callable[..., Any]:
    """The kernel of a layer, noting the place of its lengths and the number of its rows."""

    def spied(*arguments: Any, **habits: Any) -> Callable[..., None]:
        kernel = make(*arguments, **habits)

        def call(*tensors: torch.Tensor, **named: Any) -> None:
            calls.append((lengths, tensors[lengths].shape[0]))
            kernel(*tensors, **named)

        return call

    return spied


@pytest.mark.parametrize("case", CASES)
def test_rows_keep_their_results(case: Case) -> None:
    scene = make_scene(case)
    backend = scene.backend(TritonBackend)
    assert isinstance(backend, TritonBackend)
    out, lse = attend(scene, backend, ForwardMode.MIXED)
    assert out.isfinite().all()
    live = scene.live
    torch.testing.assert_close(out[live].double(), scene.expected[live], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse[live].double(), scene.expected_lse[live], rtol=1e-5, atol=1e-5)
    if case.padding:
        assert (out[-case.padding :] == 42).all()
        assert (lse[-case.padding :] == 42).all()
    new = backend.forward(scene.q, scene.layer, scene.batch)
    assert torch.equal(new[live], out[live])
    assert new.isfinite().all()


def test_the_kernels_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's counts: those in front with one new token; other modes are as they were."""
    kernels = importlib.import_module("headrace.kernels.decode_attention_triton")
    for module in (triton_backend, kernels):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)  # several splits
    rows = [(300, 1), (7, 1), (150, 1), (20, 6), (4, 1)]
    scene = make_scene(Case(rows=rows, ended=frozenset({1})))
    backend = scene.backend(TritonBackend)
    assert isinstance(backend, TritonBackend)
    calls: list[tuple[int, int]] = []
    backend._decode = spy(backend._decode, 2, calls)
    backend._extend = spy(backend._extend, 3, calls)
    live = scene.live
    results = []
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.MIXED):
        results.append([part[live] for part in attend(scene, backend, mode)])
    assert calls == [(3, 5), (2, 3), (3, 2), (2, 3), (3, 2)]
    extended, mixed, again = results
    for one, other in zip(extended, mixed, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert all(torch.equal(one, other) for one, other in zip(mixed, again, strict=True))

    scratch = backend._cut["scratch"]  # of the first mixed step, kept for the second
    assert scratch is not None
    assert scratch.lse.numel() == 3 * 6 * 4
    longer = make_scene(Case(rows=[(500, 1), *rows[1:]]))
    attend(longer, backend, ForwardMode.MIXED)
    assert backend._cut["scratch"] is not scratch
    attend(scene, backend, ForwardMode.MIXED)
    assert backend._cut["scratch"] is not scratch  # larger scratch serves smaller steps


def test_decode_steps_send_every_row_to_the_decode_kernel() -> None:
    scene = make_scene(replace(CASES[2], rows=[(33, 1), (-1, 1)], padding=0, decode=True))
    backend = scene.backend(TritonBackend)
    assert isinstance(backend, TritonBackend)
    calls: list[tuple[int, int]] = []
    backend._decode = spy(backend._decode, 2, calls)
    attend(scene, backend, ForwardMode.DECODE)
    assert calls == [(2, 2)]
