"""The product of few rows against its twin, and parts of sums on their way to who adds them."""

from dataclasses import replace

import pytest
import torch
from fused_cases import Heads, assert_close, check_heads, draw, exact, strided
from torch.nn import functional as F

from headrace.base.errors import UnsupportedError
from headrace.kernels import few_rows as twin
from headrace.kernels import few_rows_settings, gated_activation, norm_rope_write
from headrace.kernels.device_sizes import H200_SHARED
from headrace.kernels.few_rows_settings import FewRowsSettings
from headrace.kernels.gated_activation import summed

triton = pytest.importorskip("triton", reason="the kernels need the triton package")
kernels = pytest.importorskip("headrace.kernels.few_rows_triton")
gate_kernels = pytest.importorskip("headrace.kernels.gated_activation_triton")
rope_kernels = pytest.importorskip("headrace.kernels.norm_rope_write_triton")

FLOAT, HALF = torch.float32, torch.float16  # the interpreter multiplies no bfloat16
SETTINGS = FewRowsSettings(weights=64, block=64, warps=4, stages=3)
GATED = replace(SETTINGS, weights=128)
PLAIN = {"descriptor": False}


def arguments(tokens, outputs, inputs, *, gated=False, addends=()):
    rows = outputs * (2 if gated else 1)
    named = {
        "x": strided(draw(tokens, inputs, dtype=HALF, seed=0)),
        "weight": draw(rows, inputs, dtype=HALF, seed=1, scale=inputs**-0.5),
        "activation": "silu" if gated else None,
    }
    shapes = {"bias": (rows,), "residual": (tokens, outputs)}
    return named | {name: draw(*shapes[name], dtype=HALF, seed=2) for name in addends}


@pytest.mark.parametrize(
    ("shape", "settings", "traits"),
    [
        ((5, 100, 200), SETTINGS, {"addends": ("bias", "residual")}),
        ((5, 100, 200), replace(SETTINGS, splits=3), {"addends": ("bias", "residual")}),
        ((3, 70, 130), replace(SETTINGS, splits=2, **PLAIN), {"addends": ("residual",)}),
        ((5, 101, 203), replace(SETTINGS, splits=2), {"addends": ("bias",)}),  # rows not aligned
        ((4, 100, 136), GATED, {"gated": True, "addends": ("bias",)}),
        ((4, 60, 72), replace(GATED, **PLAIN), {"gated": True}),
        ((140, 70, 64), SETTINGS, {}),  # several programs of tokens
    ],
)
def test_agrees_with_the_twin(shape, settings, traits):
    named = arguments(*shape, **traits)
    out = kernels.few_rows(**named, settings=settings)
    expected = twin.few_rows(**{name: exact(value) for name, value in named.items()})
    assert out.dtype is (HALF if settings.splits == 1 else FLOAT)
    assert out.shape[:-2] == (() if settings.splits == 1 else (settings.splits,))
    assert_close(summed(out), expected, HALF)


def test_the_twin_is_the_product():
    named = arguments(3, 10, 40, addends=("bias", "residual"))
    expected = F.linear(named["x"].double(), named["weight"].double(), named["bias"].double())
    expected += named["residual"]
    assert_close(twin.few_rows(**named), expected, HALF)
    parts = twin.few_rows(**named, splits=3)
    assert parts.shape == (3, 3, 10)
    assert_close(summed(parts), expected, FLOAT)


def test_logits_are_not_rounded():
    named = arguments(2, 70, 64)
    out = kernels.few_rows(**named, settings=SETTINGS, dtype=FLOAT)
    assert out.dtype is FLOAT
    assert_close(out, twin.few_rows(**named, dtype=FLOAT), FLOAT)
    assert not torch.equal(out, out.half().float())


def test_no_rows_are_no_launch_and_float32_is_refused():
    named = arguments(1, 70, 64)
    empty = named | {"x": named["x"][:0]}
    assert kernels.few_rows(**empty, settings=SETTINGS).shape == (0, 70)
    wide = {"x": named["x"].float(), "weight": named["weight"].float()}
    with pytest.raises(UnsupportedError, match="float32"):
        kernels.few_rows(**wide, settings=SETTINGS)


def test_parts_of_gate_and_up_are_added():
    parts = draw(3, 4, 2 * 70, dtype=FLOAT, seed=0)
    named = {"activation": "gelu_tanh", "dtype": HALF}
    out = gate_kernels.gated_activation(parts, **named)
    expected = gated_activation.gated_activation(summed(parts).double(), activation="gelu_tanh")
    assert out.dtype is HALF
    assert_close(out, expected, HALF)
    assert_close(gated_activation.gated_activation(parts, **named), expected, HALF)


@pytest.mark.parametrize("case", [Heads(tokens=3, rotary=8, dtype=HALF), Heads(tokens=2)])
def test_parts_of_heads_are_added(case):
    def in_parts(function):
        def call(qkv, **named):
            parts = draw(3, *qkv.shape, dtype=FLOAT, seed=8)
            parts[0] += qkv - summed(parts)
            queries = function(parts.contiguous(), **named, dtype=case.dtype)
            assert queries.dtype is case.dtype
            return queries

        return call

    twins = norm_rope_write.norm_rope_write
    check_heads(case, in_parts(rope_kernels.norm_rope_write), twins)
    check_heads(case, in_parts(twins), twins)


def test_settings_of_a_shape_depend_on_the_rows(monkeypatch):
    measured = {(64, 32): {16: SETTINGS, 32: None, 128: GATED}}
    monkeypatch.setattr(few_rows_settings, "MEASURED", measured)
    settings, cpu = few_rows_settings.few_rows_settings, torch.device("cpu")
    found = [settings(rows, 64, 32, cpu) for rows in (2, 16, 17, 33, 129)]
    assert found == [SETTINGS, SETTINGS, None, GATED, None]
    assert settings(2, 64, 33, cpu) is None


def test_settings_are_for_the_gpus_that_were_measured(monkeypatch):
    monkeypatch.setattr(few_rows_settings, "MEASURED", {(64, 32): {16: SETTINGS}})
    for capability, expected in (((9, 0), SETTINGS), ((8, 9), None), ((12, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        found = few_rows_settings.few_rows_settings(4, 64, 32, torch.device("cuda"))
        assert found == expected


SHAPES = [(3072, 2048), (16384, 2048), (4608, 3584), (37888, 3584), (3584, 18944), (5120, 17408)]
SHAPES += [(128256, 2048), (960, 576), (64, 512), (5120, 5120)]


@pytest.mark.parametrize("rows", [2, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule_fits_the_device(rows, shape):
    (outputs, inputs), rule = shape, few_rows_settings.few_rows_settings
    assert shape not in few_rows_settings.MEASURED
    settings = rule(rows, *shape, torch.device("cpu"))
    if settings is None:
        assert rows > 16
        return
    tokens = max(16, triton.next_power_of_2(rows))
    stage = (settings.weights + tokens) * settings.block * HALF.itemsize
    tiles = triton.cdiv(outputs, settings.weights)
    assert settings.stages >= 2
    assert settings.stages * stage <= H200_SHARED
    assert inputs // settings.splits >= min(inputs, 512)
    held = H200_SHARED // (settings.stages * stage)
    assert settings.splits == 1 or tiles * settings.splits <= 132 * held


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (129, (4096, 8192)),
        (2, (4096, 511 * 8 + 4)),  # rows of weights that are not aligned
        (2, (4096, 256)),
        (17, (16384, 2048)),  # gate and up
        (33, (128256, 2048)),
        (33, (3072, 2048)),  # narrow, but not behind a longer side
    ],
)
def test_the_rule_leaves_to_the_library_what_it_does_better(rows, shape):
    assert few_rows_settings.few_rows_settings(rows, *shape, torch.device("cpu")) is None


@pytest.mark.parametrize("rows", [3, 20, 40])
def test_settings_of_the_rule_agree_with_the_twin(rows):
    named = arguments(rows, 100, 1096, addends=("residual",))
    settings = few_rows_settings.few_rows_settings(rows, 100, 1096, torch.device("cpu"))
    assert settings.splits == 2
    out = kernels.few_rows(**named, settings=settings)
    assert_close(
        summed(out), twin.few_rows(**{it: exact(value) for it, value in named.items()}), HALF
    )


def test_a_narrow_gate_of_the_rule_agrees_with_the_twin():
    named = arguments(3, 50, 520, gated=True)
    settings = few_rows_settings.few_rows_settings(3, 100, 520, torch.device("cpu"))
    assert (settings.splits, settings.weights) == (1, 64)
    out = kernels.few_rows(**named, settings=settings)
    assert_close(out, twin.few_rows(**{it: exact(value) for it, value in named.items()}), HALF)
