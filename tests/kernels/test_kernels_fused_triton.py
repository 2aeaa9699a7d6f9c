"""The fused kernels against their twins in float64: a selection, in the interpreter without a GPU.

The full matrix is in `test_kernels_fused_gpu.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from fused_cases import (
    DEVICE,
    Heads,
    Product,
    assert_close,
    check_heads,
    check_product,
    draw,
    exact,
    strided,
)

from headrace.base.errors import UnsupportedError
from headrace.kernels import gated_activation, matvec, norm_rope_write, norms
from headrace.kernels.matvec_settings import MatvecSettings

triton = pytest.importorskip("triton", reason="the kernels need the triton package")
matvec_kernels = pytest.importorskip("headrace.kernels.matvec_triton")
norm_kernels = pytest.importorskip("headrace.kernels.norms_triton")
gate_kernels = pytest.importorskip("headrace.kernels.gated_activation_triton")
rope_kernels = pytest.importorskip("headrace.kernels.norm_rope_write_triton")

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
MATVEC = MatvecSettings(rows=4, block=32, warps=1)

PRODUCTS = [
    (Product(outputs=7, inputs=96), MATVEC),
    (Product(outputs=9, inputs=41, norm=True, residual=True, dtype=BRAIN), MATVEC),
    (Product(outputs=9, inputs=41, norm=True, dtype=BRAIN, out_dtype=FLOAT), MATVEC),
    (Product(outputs=5, inputs=64, activation="silu", norm=True, dtype=HALF), MATVEC),
    (Product(outputs=3, inputs=33, activation="gelu_tanh", bias=True, norm=True), MATVEC),
    # x times the norm's weight is beyond float16
    (Product(outputs=5, inputs=64, norm=True, dtype=HALF, scale=8000.0), MATVEC),
    (Product(outputs=6, inputs=100, bias=True, residual=True), None),
]
HEADS = [
    Heads(tokens=5, heads=(6, 2), page=2),
    Heads(tokens=3, heads=(5, 5), dim=12, value_dim=20, rotary=8, page=1, dtype=BRAIN, padding=1),
    Heads(tokens=4, heads=(3, 1), dim=24, rotary=6, norm=False, dtype=HALF, padding=2),
]


@pytest.mark.parametrize(("case", "settings"), PRODUCTS, ids=lambda it: getattr(it, "name", ""))
def test_matvec(case, settings):
    check_product(case, matvec_kernels.matvec, matvec.matvec, settings=settings)


def test_matvec_adds_in_place():
    named = Product(outputs=6, inputs=32, residual=True).arguments()
    expected = matvec.matvec(**named)
    out = matvec_kernels.matvec(**named, out=named["residual"], settings=MATVEC)
    assert out is named["residual"]
    assert_close(out, expected, FLOAT)


def test_a_bad_row_of_weights_stays_its_own():
    """NaN in x is in every output, NaN in a row of weights in that output alone."""
    named = Product(outputs=6, inputs=32, norm=True).arguments()
    named["weight"][5, 3] = math.nan  # the last one, read in place of those past the end
    out = matvec_kernels.matvec(**named, settings=MATVEC)
    assert out.isnan().tolist() == [[False] * 5 + [True]]
    named["x"][0, 3] = math.nan
    assert matvec_kernels.matvec(**named, settings=MATVEC).isnan().all()


def test_matvec_takes_one_row():
    named = Product(outputs=4, inputs=8).arguments()
    named["x"] = named["x"].expand(2, 8)
    for function in (matvec.matvec, matvec_kernels.matvec):
        with pytest.raises(AssertionError):
            function(**named)


@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype"),
    [((3, 37), FLOAT, FLOAT), ((2, 64), BRAIN, BRAIN), ((3, 5, 24), HALF, FLOAT)],
)
def test_rms_norm(shape, dtype, weight_dtype):
    x = strided(draw(*shape, dtype=dtype, seed=0, scale=4.0))
    weight = draw(shape[-1], dtype=weight_dtype, seed=1)
    out = norm_kernels.rms_norm(x, weight, eps=1e-6)
    assert_close(out, norms.rms_norm(x.double(), weight, eps=1e-6), dtype)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF])
@pytest.mark.parametrize("splits", [1, 3])
def test_sum_rms_norm(dtype, splits):
    parts, weight = draw(splits, 4, 40, dtype=FLOAT, seed=0), draw(40, dtype=dtype, seed=2)
    expected, expected_total = norms.sum_rms_norm(parts, weight, eps=1e-5, dtype=dtype)
    out, total = norm_kernels.sum_rms_norm(parts, weight, eps=1e-5, dtype=dtype)
    if dtype is not BRAIN or torch.cuda.is_available():  # the interpreter cuts bfloat16 off
        assert torch.equal(total, expected_total)
    assert_close(total, expected_total, dtype)
    assert_close(out, expected, dtype)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, of the interpreter: exp of 90
@pytest.mark.parametrize(
    ("activation", "dtype"), [("silu", FLOAT), ("gelu_tanh", FLOAT), ("silu", BRAIN)]
)
def test_gated_activation(activation, dtype):
    x = strided(draw(3, 2 * 1030, dtype=dtype, seed=0, scale=5.0))
    x[0, :4] = torch.tensor([-90.0, 90.0, -3e4, 0.0])
    out = gate_kernels.gated_activation(x, activation=activation)
    expected = gated_activation.gated_activation(exact(x), activation=activation)
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_norm_rope_write(case):
    check_heads(case, rope_kernels.norm_rope_write, norm_rope_write.norm_rope_write)


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_norm_rope_write_of_many_tokens(case, monkeypatch):
    """Tiles of several tokens, the last one not full."""
    monkeypatch.setattr(rope_kernels, "MANY_TOKENS", 3)
    monkeypatch.setattr(rope_kernels, "TILE_VALUES", 2 * rope_kernels.next_power(case.dim))
    case = replace(case, tokens=case.tokens | 1)
    tile = rope_kernels.tile_tokens(case.tokens, max(case.dim, case.value_dim or 0))
    assert tile == (1 if case.value_dim else 2)
    check_heads(case, rope_kernels.norm_rope_write, norm_rope_write.norm_rope_write)


@pytest.mark.parametrize(
    ("tokens", "dim", "tile"), [(1, 128, 1), (511, 64, 1), (512, 128, 16), (4096, 256, 8)]
)
def test_programs_take_several_tokens_where_there_are_many(tokens, dim, tile):
    assert rope_kernels.tile_tokens(tokens, dim) == tile


def test_no_tokens_are_no_launch():
    empty = torch.empty(0, 32, device=DEVICE)
    weight = torch.ones(32, device=DEVICE)
    assert norm_kernels.rms_norm(empty, weight, eps=0.0).shape == (0, 32)
    assert gate_kernels.gated_activation(empty).shape == (0, 16)
    named = Heads(tokens=1).arguments()
    named |= {name: named[name][:0] for name in ("qkv", "positions", "slots")}
    assert rope_kernels.norm_rope_write(**named).shape == (0, 4, 16)


def test_what_is_not_taken_is_refused():
    weight = torch.ones(8, device=DEVICE)
    with pytest.raises(UnsupportedError, match="float64"):
        norm_kernels.rms_norm(weight[None].double(), weight.double(), eps=0.0)
    long = torch.ones(1, norm_kernels.MAX_SIZE + 1, device=DEVICE)
    with pytest.raises(UnsupportedError, match="at most"):
        norm_kernels.rms_norm(long, long[0], eps=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a Hopper GPU takes it")
def test_dependent_launch_is_refused_where_there_is_none():
    named = Product(outputs=4, inputs=8).arguments()
    with pytest.raises(UnsupportedError, match="pdl=False"):
        matvec_kernels.matvec(**named, pdl=True)
