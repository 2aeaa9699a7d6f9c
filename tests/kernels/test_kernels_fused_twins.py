"""The twins of the fused kernels say what the layers say: equal in float32 to the last bits.

In bfloat16 they differ by the roundings that the layers make between their steps.
"""

import pytest
import torch
from torch.nn import functional as F

from headrace.kernels.gated_activation import gated_activation
from headrace.kernels.matvec import matvec
from headrace.kernels.matvec_settings import MEASURED, MatvecSettings, matvec_settings
from headrace.kernels.norm_rope_write import norm_rope_write
from headrace.kernels.norms import rms_norm, sum_rms_norm
from headrace.layers.mlp import activation as layer_activation
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import Rotation
from headrace.layers.weights import WeightSpace
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool

FLOAT, BRAIN = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT: 1e-5, BRAIN: 2e-2}
NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
both = pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)


def close(ours, layers, dtype):
    assert ours.dtype is layers.dtype is dtype
    torch.testing.assert_close(ours, layers, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def draw(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_norm(size, dtype, offset=0.0):
    space = WeightSpace(dtype=dtype, arena=Arena("cpu"))
    norm = RMSNorm(size, eps=1e-5, offset=offset, space=space)
    with torch.no_grad():
        norm.weight.copy_(draw(size, dtype=FLOAT, seed=9))
    return norm.requires_grad_(False)


@both
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(dtype, offset):
    norm = layer_norm(40, dtype, offset)  # with an offset the weight is float32
    x, residual = draw(3, 40, dtype=dtype, seed=0), draw(3, 40, dtype=dtype, seed=1)
    close(rms_norm(x, norm.weight, eps=1e-5), norm(x), dtype)
    parts = torch.stack((x, residual)).float()
    normed, total = sum_rms_norm(parts, norm.weight, eps=1e-5, dtype=dtype)
    assert torch.equal(total, x + residual)
    close(normed, norm(total), dtype)


@both
@pytest.mark.parametrize("activation", NAMES)
def test_gated_activation(dtype, activation):
    x = draw(3, 24, dtype=dtype, seed=0)
    gate, up = x.chunk(2, dim=-1)
    layer = layer_activation(NAMES[activation])(gate) * up
    close(gated_activation(x, activation=activation), layer, dtype)


@both
@pytest.mark.parametrize("activation", [None, *NAMES])
def test_matvec(dtype, activation):
    x, norm = draw(1, 32, dtype=dtype, seed=0), layer_norm(32, dtype)
    weight, bias = draw(12, 32, dtype=dtype, seed=2) / 6, draw(12, dtype=dtype, seed=3)
    named = {"norm_weight": norm.weight, "eps": 1e-5, "bias": bias}
    layer = F.linear(norm(x), weight, bias)
    if activation is None:
        residual = draw(1, 12, dtype=dtype, seed=4)
        named["residual"], layer = residual, residual + layer
    else:
        gate, up = layer.chunk(2, dim=-1)
        named["activation"], layer = activation, layer_activation(NAMES[activation])(gate) * up
    close(matvec(x, weight, **named), layer, dtype)


@both
@pytest.mark.parametrize(("rotary", "qk_norm"), [(16, True), (8, True), (16, False)])
def test_norm_rope_write(dtype, rotary, qk_norm):
    tokens, heads, kv_heads, dim, value_dim = 4, 6, 2, 16, 12
    width = (heads + kv_heads) * dim + kv_heads * value_dim
    qkv = draw(tokens, width, dtype=dtype, seed=0)
    table = draw(20, rotary, dtype=FLOAT, seed=1)
    positions, slots = torch.tensor([3, 19, 0, 0]), torch.tensor([9, 5, 0, 0])
    shape = {"num_layers": 1, "num_pages": 3, "page_size": 4, "num_kv_heads": kv_heads}
    pools = [
        MHATokenToKVPool(Arena("cpu"), **shape, head_dim=dim, v_head_dim=value_dim, dtype=dtype)
        for _ in range(2)
    ]
    for cache in (cache for pool in pools for cache in pool.key_value(0)):
        cache.zero_()
    norms = [layer_norm(dim, dtype), layer_norm(dim, dtype)] if qk_norm else [lambda x: x] * 2
    named = {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "eps": 1e-5} if qk_norm else {}

    q = norm_rope_write(qkv, table, positions, *pools[0].key_value(0), slots, **named)
    rotation = Rotation(table, positions)
    rotating = (heads + kv_heads) * dim
    layer_q, layer_k = qkv[:, :rotating].unflatten(1, (-1, dim)).split((heads, kv_heads), dim=1)
    v = qkv[:, rotating:].unflatten(1, (kv_heads, value_dim))
    pools[1].write(0, slots, rotation.apply(norms[1](layer_k)), v)
    close(q, rotation.apply(norms[0](layer_q)), dtype)
    for ours, theirs in zip(pools[0].key_value(0), pools[1].key_value(0), strict=True):
        close(ours[1:], theirs[1:], dtype)
        assert ours[1:].count_nonzero() == 2 * ours[0, 0].numel()  # two live tokens, no more


def test_out_is_written_and_returned():
    x = draw(2, 8, dtype=FLOAT, seed=0)
    weight = torch.ones(8)
    out = torch.empty(2, 8)
    assert rms_norm(x, weight, eps=0.0, out=out) is out
    assert torch.equal(out, rms_norm(x, weight, eps=0.0))
    out = torch.empty(2, 4)
    assert gated_activation(x, out=out) is out
    assert torch.equal(out, gated_activation(x))
    row = x[:1]
    out = torch.empty(1, 2)
    assert matvec(row, x, out=out) is out
    assert torch.equal(out, matvec(row, x))


def test_matvec_rounds_once_or_not_at_all():
    """Float32 logits of bfloat16 operands are those of the widened operands."""
    x, weight = draw(1, 64, dtype=BRAIN, seed=0), draw(12, 64, dtype=BRAIN, seed=1)
    out = matvec(x, weight, out=torch.empty(1, 12))
    assert torch.equal(out, matvec(x.float(), weight.float()))
    assert torch.equal(out.to(BRAIN), matvec(x, weight))
    assert not torch.equal(out, out.to(BRAIN).float())


def test_settings_are_those_measured_and_fit_any_shape():
    """A program's rows and columns are powers of two that registers hold."""
    for shape, settings in MEASURED.items():
        assert matvec_settings(*shape) == settings
    for outputs in (1, 576, 6144, 151936):
        for inputs in (64, 576, 1024, 1536, 5120, 28672):
            settings = matvec_settings(outputs, inputs)
            assert settings.rows & (settings.rows - 1) == settings.block & (settings.block - 1) == 0
            assert settings.rows * settings.block <= 8192
            assert settings.block < 2 * max(inputs, 128)


def test_large_weights_are_launched_in_order():
    """As measured on both sides of the border: 8B's down gains by dependent launch, gate up not."""
    assert matvec_settings(4096, 12300).dependent_launch
    assert not matvec_settings(24576, 4100).dependent_launch
    with pytest.raises(AssertionError, match="wait for"):
        MatvecSettings(rows=2, block=1024, warps=4, dependent_launch=False, prefetch=True)
