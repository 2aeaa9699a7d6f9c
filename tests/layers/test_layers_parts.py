"""Norm, rope, MLP, embedding and head against their definitions in float64."""

import math

import pytest
import torch

from headrace.base.errors import UnsupportedError
from headrace.config.persona import RopeTraits
from headrace.config.plan import RopePlan
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.mlp import ACTIVATIONS, GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RotaryEmbedding
from headrace.layers.rope_frequencies import rope_frequencies
from headrace.layers.weights import WeightSpace, weight_slots
from headrace.memory.arena import Arena


def space(dtype: torch.dtype = torch.float32) -> WeightSpace:
    return WeightSpace(dtype=dtype, arena=Arena("cpu"))


def default_rope(rotary_dim: int, length: int, **changes: object) -> RopePlan:
    traits = RopeTraits(kind="default", theta=100.0, rotary_dim=rotary_dim, max_position=64)
    for name, value in changes.items():
        traits = RopeTraits(**{**_fields(traits), name: value})
    return RopePlan(traits=traits, length=length)


def _fields(traits: RopeTraits) -> dict[str, object]:
    return {name: getattr(traits, name) for name in RopeTraits.__slots__}


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_norm(dtype: torch.dtype, tolerance: float, offset: float) -> None:
    norm = RMSNorm(48, eps=0.1, offset=offset, space=space(dtype))
    stored = torch.randn(48).to(dtype)
    next(norm.slots("norm")).fill(stored)
    x = torch.randn(5, 48).to(dtype)
    normed = norm(x)
    assert normed.dtype == dtype
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 0.1).sqrt()
    exact = exact * (offset + stored.double())
    torch.testing.assert_close(normed.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", [8, 16])
def test_rotation_turns_pairs_by_the_position(rotary: int, dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(default_rope(rotary, 50), space=space())
    positions = torch.tensor([0, 1, 49])
    x = torch.randn(3, 2, 16).to(dtype)
    turned = rope(positions).apply(x)
    assert turned.dtype == dtype
    assert torch.equal(turned[0], x[0])  # position 0
    assert torch.equal(turned[..., rotary:], x[..., rotary:])
    half = rotary // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary].double())
    angles = positions[:, None].double() * 100.0 ** (-torch.arange(half).double() / half)
    exact = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    close = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2}
    torch.testing.assert_close(turned[..., :half].double(), exact.real, **close)
    torch.testing.assert_close(turned[..., half:rotary].double(), exact.imag, **close)


def test_rotation_in_bfloat16_keeps_far_positions_apart() -> None:
    """Angles stay float32: in bfloat16 positions 4000 and 4001 would be the same."""
    rope = RotaryEmbedding(default_rope(4, 4002), space=space(torch.bfloat16))
    assert rope.cache.dtype == torch.float32
    near, next_to_it = rope.cache[4000], rope.cache[4001]
    expected = torch.tensor([math.cos(4000.0), math.cos(4001.0)])
    torch.testing.assert_close(torch.stack((near[0], next_to_it[0])), expected, atol=1e-4, rtol=0)


def test_a_length_dependent_rope_is_fixed_by_the_plan() -> None:
    def dynamic(length: int) -> torch.Tensor:
        return rope_frequencies(default_rope(16, length, kind="dynamic", factor=2.0))[0]

    assert torch.equal(dynamic(10), dynamic(64))  # within the original context
    assert not torch.equal(dynamic(64), dynamic(65))


def test_an_unknown_rope_is_refused() -> None:
    plan = default_rope(16, 64, kind="spiral")
    with pytest.raises(UnsupportedError, match=r"'spiral'.*default, linear, dynamic, yarn"):
        rope_frequencies(plan)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_mlp(act: str) -> None:
    mlp = GatedMLP(12, 20, act=act, bias=True, space=space())
    stored = {}
    for name, slot in weight_slots(torch.nn.ModuleDict({"mlp": mlp})).items():
        stored[name] = torch.randn(slot.destination.shape)
        slot.fill(stored[name])
    norm = RMSNorm(12, eps=1e-6, space=space())
    norm.weight.fill_(1.0)
    x = torch.randn(3, 12)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def part(name: str, value: torch.Tensor) -> torch.Tensor:
        weight, bias = stored[f"mlp.{name}.weight"], stored[f"mlp.{name}.bias"]
        return value.double() @ weight.double().T + bias.double()

    gate = part("gate_proj", normed)
    exact_act = {
        "silu": lambda v: v * torch.sigmoid(v),
        "gelu": lambda v: v * 0.5 * (1 + torch.erf(v / math.sqrt(2))),
        "gelu_pytorch_tanh": lambda v: (
            0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        ),
        "relu": lambda v: v.clamp(min=0),
    }[act]
    exact = part("down_proj", exact_act(gate) * part("up_proj", normed))
    torch.testing.assert_close(
        mlp.down_proj(mlp.gate(norm, x)[0]).double(), exact, rtol=1e-4, atol=1e-4
    )


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'snake'.*silu, gelu"):
        GatedMLP(4, 4, act="snake", bias=False, space=space())


def test_the_embedding_scale_is_rounded_to_the_dtype_of_the_model() -> None:
    """sqrt(3072) = 55.4256 is 55.5 in bfloat16; Gemma was trained with that."""
    wide = Embedding(2, 4, scale=3072**0.5, space=space(torch.bfloat16))
    wide.weight.fill_(1.0)
    assert wide(torch.tensor([1])).tolist() == [[55.5] * 4]
    exact = Embedding(2, 4, scale=3072**0.5, space=space())
    exact.weight.fill_(1.0)
    torch.testing.assert_close(exact(torch.tensor([1])), torch.full((1, 4), 3072**0.5))


def test_head_logits_are_float32_and_capped() -> None:
    head = LMHead(6, 4, soft_cap=3.0, space=space(torch.bfloat16))
    next(head.slots("lm_head")).fill(torch.randn(6, 4) * 5)
    hidden = torch.randn(2, 4).to(torch.bfloat16)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    assert head.weight is not None
    plain = (hidden @ head.weight.T).float()
    torch.testing.assert_close(logits, 3.0 * torch.tanh(plain / 3.0))
    assert plain.abs().max() > 3 >= logits.abs().max()
