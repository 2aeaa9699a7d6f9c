"""The contract between layers and loader."""

import pytest
import torch
from torch import nn

from headrace.base.errors import CheckpointError
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.linear import Linear, MergedLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.weight_formats import DENSE, WEIGHT_FORMATS, choose_weight_format
from headrace.layers.weights import (
    WeightSlot,
    WeightSpace,
    finish_weights,
    weight_bytes,
    weight_slots,
)
from headrace.memory.arena import Arena

CPU = torch.device("cpu")


def space(dtype: torch.dtype = torch.float32, format_name: str = "dense") -> WeightSpace:
    return WeightSpace(dtype=dtype, arena=Arena("cpu"), format=WEIGHT_FORMATS[format_name])


class Attention(nn.Module):
    def __init__(self, where: WeightSpace) -> None:
        super().__init__()
        self.qkv_proj = MergedLinear(
            8, {"q_proj": 6, "k_proj": 2, "v_proj": 4}, bias=True, space=where
        )
        self.o_proj = Linear(6, 8, bias=False, space=where)
        self.q_norm = RMSNorm(6, eps=1e-6, offset=1.0, space=where)


def fill(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for name, slot in weight_slots(model).items():
        stored[name] = torch.randn(slot.destination.shape, generator=generator)
        slot.fill(stored[name])
    return stored


def test_a_merged_layer_declares_the_parts_of_the_checkpoint() -> None:
    model = nn.ModuleDict({"self_attn": Attention(space())})
    stored = fill(model)
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {
        "self_attn.q_proj.weight": [6, 8],
        "self_attn.q_proj.bias": [6],
        "self_attn.k_proj.weight": [2, 8],
        "self_attn.k_proj.bias": [2],
        "self_attn.v_proj.weight": [4, 8],
        "self_attn.v_proj.bias": [4],
        "self_attn.o_proj.weight": [8, 6],
        "self_attn.q_norm.weight": [6],
    }
    x = torch.randn(3, 8)
    parts = model["self_attn"].qkv_proj(x).split((6, 2, 4), dim=-1)
    for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
        weight, bias = (stored[f"self_attn.{name}.{kind}"] for kind in ("weight", "bias"))
        torch.testing.assert_close(part, x @ weight.T + bias)


def test_slots_cover_every_element_of_every_parameter() -> None:
    model = Attention(space())
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    fill(model)
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_a_parameter_without_a_slot_is_our_own_bug() -> None:
    model = nn.ModuleDict({"forgotten": nn.Linear(2, 2)})
    with pytest.raises(AssertionError, match="forgotten owns parameters"):
        weight_slots(model)


def test_a_slot_takes_only_its_shape_and_names_the_tensor() -> None:
    slot = WeightSlot(name="model.norm.weight", destination=torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[1, 4\]"):
        slot.fill(torch.ones(1, 4))  # copy_ alone would broadcast
    assert not slot.destination.any()


def test_an_offset_is_added_before_rounding() -> None:
    """1 + w in bfloat16 would lose this w; the norm keeps the sum in float32."""
    norm = RMSNorm(4, eps=0.0, offset=1.0, space=space(torch.bfloat16))
    stored = torch.tensor([0.001, -0.001, 0.0, 2.0], dtype=torch.bfloat16)
    weight_slots(nn.ModuleDict({"norm": norm}))["norm.weight"].fill(stored)
    torch.testing.assert_close(norm.weight.data, 1 + stored.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finished_weights_give_the_same_product_and_free_the_loaded(dtype: torch.dtype) -> None:
    if choose_weight_format(CPU, dtype).value != "onednn":
        pytest.skip("this CPU has no onednn format")
    where, plain = space(dtype, "onednn"), space(dtype)
    packed, dense = Attention(where), Attention(plain)
    fill(packed)
    fill(dense)
    before, held = weight_bytes(packed), where.arena.bytes("weights")
    finish_weights(packed)
    assert packed.qkv_proj.weight is None
    assert where.arena.bytes("weights") < held
    assert weight_bytes(packed) == before
    for tokens in (0, 1, 17):
        x = torch.randn(tokens, 8).to(dtype)
        torch.testing.assert_close(packed.qkv_proj(x), dense.qkv_proj(x))
    with pytest.raises(AssertionError, match="loaded form is gone"):
        weight_slots(packed)


def test_dense_weights_stay_where_they_were_loaded() -> None:
    model = Attention(space())
    fill(model)
    weight = model.qkv_proj.weight
    finish_weights(model)
    assert model.qkv_proj.weight is weight
    assert weight_slots(model)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_tied_head_shares_the_table_of_the_embedding(name: str) -> None:
    where = space(format_name=name)
    embedding = Embedding(10, 4, space=where)
    head = LMHead(10, 4, tied=embedding, space=where)
    model = nn.ModuleDict({"embed": embedding, "lm_head": head})
    assert list(weight_slots(model)) == ["embed.weight"]
    table = fill(model)["embed.weight"]
    finish_weights(model)
    hidden = torch.randn(2, 4)
    torch.testing.assert_close(head(hidden), hidden @ table.T)
    torch.testing.assert_close(embedding(torch.tensor([3, 9])), table[[3, 9]])


def test_the_format_is_chosen_with_reasons() -> None:
    gpu = choose_weight_format(torch.device("cuda"), torch.bfloat16)
    assert gpu.value == DENSE.name
    assert [str(refusal) for refusal in gpu.refused] == [
        "onednn: its kernels run on the CPU, not on cuda"
    ]
    half = choose_weight_format(CPU, torch.float16)
    assert half.value == DENSE.name
    assert half.refused[0].subject == "onednn"
    if torch.backends.mkldnn.is_available():
        assert choose_weight_format(CPU, torch.float32).value == "onednn"


def test_without_onednn_weights_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    decision = choose_weight_format(CPU, torch.float32)
    assert decision.value == DENSE.name
    assert "no oneDNN" in decision.refused[0].reason
