"""The product whose rows have the same bits in any batch: against its twin, and its tiles."""

import pytest
import torch
from fused_cases import assert_close, draw, exact, strided

from headrace.kernels import few_rows as twin
from headrace.kernels.device_sizes import H200_SHARED
from headrace.kernels.few_rows_settings import FewRowsSettings
from headrace.kernels.invariant_product_settings import (
    ProductSettings,
    product_settings,
    settings_on_hopper,
)

pytest.importorskip("triton", reason="the kernels need the triton package")
kernels = pytest.importorskip("headrace.kernels.invariant_product_triton")

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
SMALL = ProductSettings(tokens=64, weights=32, block=64, warps=4, stages=3)
WIDE = ProductSettings(tokens=128, weights=64, block=32, warps=8, stages=3, group=2)


def arguments(tokens, outputs, inputs, *, dtype=HALF, activation=None, addends=()):
    rows = outputs * (2 if activation else 1)
    named = {
        "x": strided(draw(tokens, inputs, dtype=dtype, seed=0)),
        "weight": draw(rows, inputs, dtype=dtype, seed=1, scale=inputs**-0.5),
        "activation": activation,
    }
    shapes = {"bias": (rows,), "residual": (tokens, outputs)}
    return named | {name: draw(*shapes[name], dtype=dtype, seed=2) for name in addends}


@pytest.mark.parametrize(
    ("shape", "tile", "traits"),
    [
        ((5, 100, 200), SMALL, {"addends": ("bias", "residual")}),
        ((270, 70, 64), WIDE, {"dtype": BRAIN, "addends": ("residual",)}),
        ((3, 101, 203), SMALL, {}),  # rows that no descriptor takes
        ((4, 100, 136), SMALL, {"activation": "silu", "addends": ("bias",)}),
        ((4, 33, 72), WIDE, {"activation": "gelu_tanh", "dtype": BRAIN}),
        ((20, 40, 100), None, {"dtype": FLOAT, "addends": ("residual",)}),
    ],
)
def test_agrees_with_the_twin(shape, tile, traits):
    named = arguments(*shape, **traits)
    out = kernels.invariant_product(**named, settings=tile)
    expected = twin.few_rows(**{name: exact(value) for name, value in named.items()})
    assert out.dtype is named["x"].dtype
    assert_close(out, expected, out.dtype)


def test_rounded_once_behind_everything():
    """The sum, the bias, the residual: the bits that float32 gives, up to the order of the sum."""
    named = arguments(3, 40, 32, addends=("bias", "residual"))
    out = kernels.invariant_product(**named, settings=SMALL)
    wide = kernels.invariant_product(**named, settings=SMALL, dtype=FLOAT)
    assert wide.dtype is FLOAT
    assert torch.equal(out, wide.half())
    bare = kernels.invariant_product(named["x"], named["weight"], settings=SMALL, dtype=FLOAT)
    assert torch.equal(wide, bare + named["bias"].float() + named["residual"].float())


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype):
    # By one tile: the interpreter's own products follow the tile, as tensor cores do not.
    tile = SMALL if dtype is HALF else None
    named = arguments(70, 48, 96, dtype=dtype, addends=("bias",))
    whole = kernels.invariant_product(**named, settings=tile)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 20)):
        alone = kernels.invariant_product(**named | {"x": named["x"][rows]}, settings=tile)
        assert torch.equal(alone, whole[rows])


def test_no_rows_are_no_launch(monkeypatch):
    monkeypatch.setattr(kernels, "_product_kernel", None)
    named = arguments(1, 70, 64)
    assert kernels.invariant_product(**named | {"x": named["x"][:0]}).shape == (0, 70)


MODELS = [
    *[(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    *[(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    *[(28672, 4096), (4096, 14336), (192, 128), (256, 128), (49152, 576)],
]


@pytest.mark.parametrize(("outputs", "inputs"), MODELS)
def test_every_tile_fits_and_is_a_warp_groups(outputs, inputs):
    for rows in (16, 64, 128, 256, 1024, 8192):
        for gated in (False, True):
            tile = settings_on_hopper(rows, outputs, inputs, gated)
            if isinstance(tile, FewRowsSettings):  # the weights are the rows of the warp group
                assert tile.weights // (2 if gated else 1) % 64 == 0
                assert tile.splits == 1
                assert tile.stages >= 2
                assert (rows + tile.weights) * tile.block * 2 * tile.stages <= H200_SHARED
                continue
            assert tile.tokens % 64 == 0
            assert tile.warps in (4, 8)
            assert tile.tokens // 64 * (tile.weights // (2 if gated else 1)) % 16 == 0
            assert (tile.weights // (2 if gated else 1)) >= 16
            assert tile.stages >= 2
            assert tile.shared <= H200_SHARED


def test_tiles_change_at_powers_of_two_only():
    given = {"gated": False, "dtype": BRAIN, "device": torch.device("cpu")}
    found = [product_settings(rows, 4096, 4096, **given) for rows in (1, 2, 64, 65, 128, 129, 256)]
    assert found[0] is found[1]
    assert found[3] is found[4]
    assert found[5] is found[6]
    many = [product_settings(rows, 4096, 4096, **given) for rows in (8192, 8193, 100_000)]
    assert many[0] is many[1] is many[2]


def test_float32_has_one_tile():
    given = {"gated": False, "dtype": FLOAT, "device": torch.device("cpu")}
    assert product_settings(1, 64, 64, **given) is product_settings(5000, 4096, 4096, **given)
