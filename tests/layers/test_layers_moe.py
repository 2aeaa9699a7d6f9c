"""Router and experts against a loop over tokens; padding, ties, steps without tokens."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.config.persona import MoeTraits
from headrace.layers.moe import Experts, Router
from headrace.layers.operators import TORCH_OPERATORS
from headrace.layers.weights import WeightSpace, weight_slots
from headrace.memory.arena import Arena

EXPERTS, CHOSEN, HIDDEN, INNER = 6, 3, 16, 24


def moe(**changes: Any) -> MoeTraits:
    traits = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "intermediate_size": INNER,
        "norm_topk_prob": False,
    }
    return MoeTraits(**traits | changes)


def space(dtype: torch.dtype = torch.float32) -> WeightSpace:
    return WeightSpace(dtype=dtype, arena=Arena("cpu"), operators=TORCH_OPERATORS)


def router(weight: Tensor, **changes: Any) -> Router:
    made = Router(moe(**changes), HIDDEN, space=space())
    made.weight.data.copy_(weight)
    return made


def experts(dtype: torch.dtype = torch.float32) -> Experts:
    made = Experts(moe(), HIDDEN, act="silu", space=space(dtype))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return made


def one_by_one(made: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[T, H] float64, token by token and expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (made.gate_up[expert].double() @ x[token].double()).split(INNER)
            out[token] += weight * (made.down[expert].double() @ (F.silu(gate) * up))
    return out


def routing(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids, weights; the last expert is never chosen."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(-1)[:, :CHOSEN]
    return x, ids, torch.rand(tokens, CHOSEN, generator=generator)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str
)
def test_experts_are_the_loop(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    made, (x, ids, weights) = experts(dtype), routing(tokens)
    x, residual = x.to(dtype), torch.ones(tokens, HIDDEN, dtype=dtype)
    out = made(x, ids, weights, residual)
    assert out.dtype is dtype
    torch.testing.assert_close(
        out.double(), 1 + one_by_one(made, x, ids, weights), rtol=tolerance, atol=tolerance
    )


def test_padding_changes_no_other_row() -> None:
    made, (x, ids, weights) = experts(), routing(9)
    residual = torch.zeros_like(x)
    alone = made(x[:5], ids[:5], weights[:5], residual[:5])
    x[5:] = torch.nan
    torch.testing.assert_close(made(x, ids, weights, residual)[:5], alone, rtol=1e-6, atol=1e-6)


def test_no_tokens_are_legal() -> None:
    made, choose = experts(), router(torch.randn(EXPERTS, HIDDEN))
    x = torch.empty(0, HIDDEN)
    ids, weights = choose(x)
    assert ids.shape == weights.shape == (0, CHOSEN)
    assert made(x, ids, weights, x).shape == (0, HIDDEN)


@pytest.mark.parametrize("normed", [True, False])
def test_the_router_takes_the_likeliest(normed: bool) -> None:
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(2))
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(3))
    ids, weights = router(weight, norm_topk_prob=normed)(x)
    likely = (x @ weight.T).softmax(-1).topk(CHOSEN)
    assert ids.tolist() == likely.indices.tolist()
    expected = likely.values / likely.values.sum(-1, keepdim=True) if normed else likely.values
    torch.testing.assert_close(weights, expected)


def test_of_equal_experts_the_first_is_taken() -> None:
    weight = torch.zeros(EXPERTS, HIDDEN)
    weight[4] = 1.0
    ids, _ = router(weight)(torch.ones(64, HIDDEN))
    assert ids.tolist() == [[4, 0, 1]] * 64


def test_the_choice_is_made_in_float32() -> None:
    """Logits that bfloat16 cannot tell apart."""
    weight = torch.zeros(EXPERTS, HIDDEN)
    weight[:, 0] = 256.0 + torch.arange(EXPERTS) / 8
    ids, _ = router(weight)(F.one_hot(torch.tensor([0]), HIDDEN).bfloat16())
    assert ids.tolist() == [[5, 4, 3]]


def test_every_expert_has_its_slots() -> None:
    made = experts()
    slots = weight_slots(torch.nn.ModuleDict({"experts": made}))
    assert len(slots) == 3 * EXPERTS
    for name, value in (("gate_proj", 1.0), ("up_proj", 2.0), ("down_proj", 3.0)):
        slot = slots[f"experts.2.{name}.weight"]
        slot.fill(torch.full(slot.destination.shape, value))
    assert (made.gate_up[2, :INNER] == 1).all()
    assert (made.gate_up[2, INNER:] == 2).all()
    assert (made.down[2] == 3).all()
    assert not (made.gate_up[1] == 1).any()
