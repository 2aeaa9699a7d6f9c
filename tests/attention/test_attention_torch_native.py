"""What torch_native does in ways of its own; its claims are checked by the kit (tests/testing)."""

from dataclasses import replace

import pytest
import torch

from headrace.attention import native_blocks, native_deterministic, native_math, native_tiles
from headrace.attention.native_blocks import QUERY_ROWS, proven_query_rows
from headrace.attention.native_deterministic import DeterministicNativeBackend
from headrace.attention.native_tiles import make_tiles
from headrace.attention.torch_native import TorchNativeBackend
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.testing.paged_batches import Case, check, make_batch, make_scene, run

LENGTHS = [1, 15, 16, 17, 200]
DECODE = [(length - 1, 1) for length in LENGTHS]
FRESH = [(0, length) for length in LENGTHS]
MIXED = [(0, 17), (199, 1), (16, 15), (0, 1), (31, 2), (5, 200), (64, 1)]
STEPS = {"decode": DECODE, "fresh": FRESH, "mixed": MIXED}
HABITS = {
    "plain": {},
    "window": {"window": 16},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 16, "soft_cap": 2.0, "sinks": True},
}


def case_of(step: str, **options: object) -> Case:
    return Case(rows=STEPS[step], decode=step == "decode", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("habits", HABITS)
def test_many_small_tiles_give_the_same(habits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_tiles, "TILE_QUERIES", 16)
    monkeypatch.setattr(native_tiles, "MASK_ELEMENTS", 1000)
    monkeypatch.setitem(native_tiles.GATHER_ELEMENTS, "cpu", 32 * 2 * 20)
    monkeypatch.setattr(native_tiles, "STEP_MASK_ELEMENTS", 0)
    monkeypatch.setattr(native_math, "SCORE_ELEMENTS", 100)
    monkeypatch.setattr("headrace.attention.torch_native.SMALL_ELEMENTS", 0)
    for step in STEPS:
        check(case_of(step, **HABITS[habits]), TorchNativeBackend)


@pytest.mark.parametrize("habits", HABITS)
def test_rows_of_length_zero_give_zero(habits: str) -> None:
    case = Case(rows=[(-1, 1), (20, 1), (-1, 1)], decode=True, **HABITS[habits])  # type: ignore[arg-type]
    check(case, TorchNativeBackend, with_lse=True)
    scene = make_scene(case)
    out, lse = run(scene, scene.backend(TorchNativeBackend), with_lse=True)
    assert lse is not None
    assert (out[~scene.live] == 0).all()
    assert (lse[~scene.live] == -torch.inf).all()
    assert (run(scene, scene.backend(TorchNativeBackend))[0][~scene.live] == 0).all()


def test_padding_tokens_give_zero() -> None:
    scene = make_scene(Case(rows=MIXED, padding=3))
    out, lse = run(scene, scene.backend(TorchNativeBackend), with_lse=True)
    assert lse is not None
    assert (out[-3:] == 0).all()
    assert (lse[-3:] == -torch.inf).all()
    torch.testing.assert_close(out.double(), scene.expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("habits", HABITS)
@pytest.mark.parametrize("row", [(199, 1), (33, 150)])
def test_one_row_with_consecutive_pages_is_read_in_place(
    page_size: int, habits: str, row: tuple[int, int]
) -> None:
    options = {"rows": [row], "decode": row[1] == 1, "page_size": page_size, **HABITS[habits]}
    case = Case(**options, shuffled=False)  # type: ignore[arg-type]
    check(case, TorchNativeBackend)
    for shuffled in (False, True):
        batch = make_scene(replace(case, shuffled=shuffled)).batch
        tiles = make_tiles(batch, "full", window=case.window, key_elements=64, dtype=torch.float32)
        in_place = [isinstance(tile.slots, slice) for tile in tiles]
        assert all(in_place) if not shuffled else not any(in_place)


@pytest.mark.parametrize("window", [512, None])
def test_tiles_of_long_steps_are_bounded_and_cover_every_token(window: int | None) -> None:
    rows = [(0, 4096), (30_000, 600), *[(400 * index, 1) for index in range(1, 33)]]
    case = Case(rows=rows, page_size=64, heads=(1, 1), dims=(1, 1), window=window)
    batch = make_batch(case, torch.zeros(len(rows), 30_600 // 64 + 1, dtype=torch.int32))
    tiles = make_tiles(batch, "full", window=window, key_elements=8 * 128, dtype=torch.float32)
    tokens = torch.arange(case.tokens)
    covered = torch.cat(
        [tokens[t.tokens] if t.real is None else tokens[t.tokens][t.real] for t in tiles]
    )
    assert covered.sort().values.equal(tokens)
    for tile in tiles:
        assert tile.rows * tile.queries * tile.keys <= native_tiles.MASK_ELEMENTS
        bound = max(native_tiles.GATHER_ELEMENTS["cpu"], tile.keys * 8 * 128)
        assert tile.rows * tile.keys * 8 * 128 <= bound
        if window is not None:
            assert tile.keys < window + 256


def test_no_graph_takes_it() -> None:
    scene = make_scene(case_of("decode"))
    backend = scene.backend(TorchNativeBackend)
    assert not TorchNativeBackend.capabilities.graph_decode
    with pytest.raises(UnsupportedError, match="torch_native cannot be captured"):
        backend.capture_buffers(Bucket(tokens=8, sequences=8))
    with pytest.raises(UnsupportedError, match="torch_native cannot be captured"):
        backend.prepare_metadata_in_graph(scene.batch)


def test_a_cpu_whose_products_follow_the_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(Case(rows=MIXED))
    proven = proven_query_rows(scene.case.dims[0], scene.case.dims[1])
    assert proven
    assert set(proven) <= set(QUERY_ROWS)
    out = run(scene, scene.backend(DeterministicNativeBackend))[0]
    for sizes in (proven[-1:], proven[-2:]):  # others, the same bits
        monkeypatch.setattr(native_deterministic, "proven_query_rows", lambda *dims, s=sizes: s)
        assert torch.equal(run(scene, scene.backend(DeterministicNativeBackend))[0], out)
    monkeypatch.setattr(native_deterministic, "proven_query_rows", lambda *dims: ())
    with pytest.raises(UnsupportedError, match="depend on a query's place") as caught:
        scene.backend(DeterministicNativeBackend)
    assert "OMP_NUM_THREADS" in caught.value.remedy


@pytest.mark.parametrize("habits", HABITS)
def test_deterministic_scores_in_parts_are_those_of_the_whole(
    habits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(case_of("mixed", **HABITS[habits]))
    whole, sums = run(scene, scene.backend(DeterministicNativeBackend), with_lse=True)
    monkeypatch.setattr(native_blocks, "SCORE_ELEMENTS", 1)  # a KV head at a time
    parts, part_sums = run(scene, scene.backend(DeterministicNativeBackend), with_lse=True)
    assert torch.equal(parts, whole)
    assert sums is not None
    assert part_sums is not None
    assert torch.equal(part_sums, sums)
