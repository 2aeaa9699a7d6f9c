"""The backend `triton` of deterministic mode: who is built, and rows alike on every way."""

from dataclasses import replace

import pytest
import torch

from headrace.attention.capabilities import AttentionNeed, Phase
from headrace.attention.selection import build_attention_backend, select_attention
from headrace.attention.triton_backend import TritonBackend
from headrace.attention.triton_deterministic_backend import TritonDeterministicBackend
from headrace.batch.facts import Bucket
from headrace.batch.forward_mode import ForwardMode
from headrace.config.hardware import assumed_hardware
from headrace.kernels.support_triton import triton_available
from headrace.testing.paged_batches import Case, Scene, make_scene

pytestmark = pytest.mark.skipif(
    triton_available("cpu") is not None, reason="needs Triton's interpreter"
)
MIXED = Case(rows=[(300, 1), (7, 1), (600, 1), (20, 6), (4, 1)], heads=(4, 2), dims=(16, 16))


def attend(scene: Scene, backend: TritonDeterministicBackend) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.zeros(scene.expected_lse.shape)
    backend.prepare_metadata(scene.batch)
    return backend.forward(scene.q, scene.layer, scene.batch, lse=lse), lse


def backend_of(scene: Scene, *, longest: int = 1) -> TritonDeterministicBackend:
    backend = scene.backend(TritonDeterministicBackend, longest=longest)
    assert isinstance(backend, TritonDeterministicBackend)
    return backend


def test_the_mode_chooses_the_class() -> None:
    setting = backend_of(make_scene(MIXED)).setting
    kinds = [
        type(build_attention_backend("triton", "triton", setting, deterministic=asked))
        for asked in (False, True)
    ]
    assert kinds == [TritonBackend, TritonDeterministicBackend]
    need = AttentionNeed.of(
        Phase.DECODE,
        MIXED.group,
        MIXED.attention,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=16,
        deterministic=True,
    )
    assert select_attention(Phase.DECODE, None, need, assumed_hardware("h100")).value == "triton"


def test_rows_of_mixed_steps_have_the_bits_of_prompts() -> None:
    scene = make_scene(MIXED)
    backend, results = backend_of(scene), []
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        scene.batch.mode = mode
        results.append(attend(scene, backend))
        assert backend._decode_rows == (3 if mode is ForwardMode.MIXED else 0)
    assert backend._cut["runs"] > 1  # so that a row in front was spread over programs
    for extended, mixed in zip(*results, strict=True):
        assert torch.equal(extended, mixed)
    torch.testing.assert_close(results[0][0].double(), scene.expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 260])
def test_graphs_have_the_bits_of_eager_steps(window: int | None) -> None:
    case = replace(MIXED, rows=[(0, 1), (70, 1), (599, 1)], decode=True, window=window)
    scene = make_scene(case)
    expected = attend(scene, backend_of(scene))[0]
    torch.testing.assert_close(expected.double(), scene.expected, rtol=2e-5, atol=2e-5)
    backend = backend_of(scene, longest=3000)
    backend.capture_buffers(Bucket(tokens=4, sequences=4))
    first = backend._scratch.captured[-1]
    backend.capture_buffers(Bucket(tokens=2, sequences=2))
    assert backend._scratch.captured == [first]  # smaller graphs share scratch
    backend.capture_buffers(Bucket(tokens=8, sequences=8))
    assert backend._scratch.captured[0] is first  # which an earlier graph still holds
    assert len(backend._scratch.captured) == 2
    backend.prepare_metadata_in_graph(scene.batch)
    assert backend._cut["runs"] > 1
    assert torch.equal(backend.forward(scene.q, scene.layer, scene.batch), expected)


def test_large_graphs_need_no_scratch() -> None:
    rows = [(length, 1) for length in (5, 300)]
    scene = make_scene(replace(MIXED, rows=rows, decode=True))
    backend = backend_of(scene)
    backend.capture_buffers(Bucket(tokens=2000, sequences=2000))
    assert not backend._scratch.captured


def test_fresh_keys_are_read_from_the_pool() -> None:
    scene = make_scene(replace(MIXED, rows=[(0, 9), (0, 3)]))
    backend = backend_of(scene)
    backend.prepare_metadata(scene.batch)
    wrong = tuple(torch.full_like(each, torch.nan) for each in scene.fresh)
    out = backend.forward(scene.q, scene.layer, scene.batch, kv=(wrong[0], wrong[1]))
    torch.testing.assert_close(out.double(), scene.expected, rtol=2e-5, atol=2e-5)
