"""Every way to compute the compositions of layers gives the numbers of the plain one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.config.persona import AttentionTraits, LayerTraits, ModelTraits, RopeTraits
from headrace.config.plan import RopePlan
from headrace.layers.attention import SelfAttention
from headrace.layers.cpu_operators import CpuOperators
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.operator_choice import choose_operators
from headrace.layers.operators import TORCH_OPERATORS, Operators
from headrace.layers.rope import RotaryEmbedding
from headrace.layers.weight_formats import WEIGHT_FORMATS, padded_rows
from headrace.layers.weights import WeightSpace, finish_weights
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool

HIDDEN, HEADS, KV_HEADS, DIM = 24, 4, 2, 8
PLAIN, CPU = TORCH_OPERATORS, CpuOperators()


def space(form: str = "dense") -> WeightSpace:
    return WeightSpace(dtype=torch.float32, arena=Arena("cpu"), format=WEIGHT_FORMATS[form])


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    finish_weights(module)
    return module


def traits(*, qk_norm: bool, rotary_dim: int) -> ModelTraits:
    attention = AttentionTraits(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        scale=1.0,
        qk_norm=qk_norm,
    )
    rope = RopeTraits(kind="default", theta=100.0, rotary_dim=rotary_dim, max_position=32)
    return ModelTraits(
        family="llama",
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        vocab_size=8,
        attention=attention,
        layers=(LayerTraits(kv_group="full"),),
        ropes={"default": rope},
        norm_eps=1e-5,
        activation="silu",
        tie_word_embeddings=True,
        max_position=32,
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["dense", "onednn"])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_norms_products_and_gates(rows: int, form: str, act: str) -> None:
    norm = filled(RMSNorm(HIDDEN, eps=0.1, space=space()))
    mlp = filled(GatedMLP(HIDDEN, 40, act=act, bias=True, space=space(form)))
    x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    results = []
    for operators in (PLAIN, CPU):
        gated, same = operators.normed_gate(norm, mlp, x)
        product, again = operators.normed_linear(norm, mlp.gate_up_proj, x)
        assert same is again is x
        results.append(
            (
                operators.norm(norm, x),
                product,
                gated,
                operators.add_linear(mlp.down_proj, gated, residual),
            )
        )
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    separate = residual + mlp.down_proj(results[0][2])
    torch.testing.assert_close(results[0][3], separate, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
def test_rotation_and_kv(rows: int, qk_norm: bool, rotary_dim: int) -> None:
    model = traits(qk_norm=qk_norm, rotary_dim=rotary_dim)
    attention = filled(SelfAttention(model, 0, space=space()))
    rope = RotaryEmbedding(RopePlan(traits=model.ropes["default"], length=32), space=space())
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM)
    positions, slots = torch.tensor([9, 4, 30])[:rows], torch.tensor([5, 2, 7])[:rows]

    def run(operators: Operators) -> tuple[torch.Tensor, ...]:
        shape = {"num_layers": 1, "num_pages": 3, "page_size": 4, "num_kv_heads": KV_HEADS}
        pool = MHATokenToKVPool(
            Arena("cpu"), **shape, head_dim=DIM, v_head_dim=DIM, dtype=torch.float32
        )
        for part in pool.key_value(0):
            part.zero_()
        attention.pool, attention.pool_layer = pool, 0
        batch = decode_batch(slots)
        return operators.rotate_and_write(attention, qkv, rope(positions), batch)[
            0
        ], *pool.key_value(0)

    for plain, ours in zip(run(PLAIN), run(CPU), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run(PLAIN)[0].flatten(), qkv[:, : HEADS * DIM].flatten())


def decode_batch(slots: torch.Tensor) -> ForwardBatch:
    rows = len(slots)
    facts = BatchFacts(
        mode=ForwardMode.DECODE, tokens=rows, live_tokens=rows, sequences=rows, max_length=32
    )
    group = KvGroup(
        name="full",
        page_size=4,
        page_table=torch.zeros(rows, 1, dtype=torch.int32),
        out_cache_loc=slots,
    )
    bounds = HostBounds(seq_lens=[32] * rows, extend_lens=[1] * rows)
    return ForwardBatch(
        mode=ForwardMode.DECODE, rows=slots, bounds=bounds, facts=facts, kv={"full": group}
    )


def test_choice_names_its_reason() -> None:
    decision, operators = choose_operators(torch.device("cpu"), "onednn")
    assert decision.value == operators.name == "cpu"
    decision, operators = choose_operators(torch.device("meta"), "dense")
    assert decision.value == operators.name == "torch"
    assert "not on meta" in decision.refused[0].reason


def test_extend_keeps_fresh_keys_and_values() -> None:
    model = traits(qk_norm=False, rotary_dim=DIM)
    attention = filled(SelfAttention(model, 0, space=space()))
    pool = MHATokenToKVPool(
        Arena("cpu"),
        num_layers=1,
        num_pages=3,
        page_size=4,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.float32,
    )
    attention.pool, attention.pool_layer = pool, 0
    rope = RotaryEmbedding(RopePlan(traits=model.ropes["default"], length=32), space=space())
    batch = decode_batch(torch.tensor([4, 5, 6]))
    batch.mode = ForwardMode.EXTEND
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM)
    for has_prefix in (False, True):
        batch.facts = replace(batch.facts, mode=ForwardMode.EXTEND, has_prefix=has_prefix)
        rotation = rope(torch.arange(3))
        fresh = PLAIN.rotate_and_write(attention, qkv, rotation, batch)[1]
        assert (fresh is None) == has_prefix


def test_onednn_meets_few_numbers_of_rows_and_pads_without_a_trace() -> None:
    """oneDNN keeps compiled code for every number of rows: memory grew with every new length."""
    assert len({padded_rows(rows) for rows in range(1, 2049)}) <= 100
    assert all(0 <= padded_rows(rows) - rows < max(16, rows // 16) for rows in range(1, 2049))
    dense, packed = WEIGHT_FORMATS["dense"], WEIGHT_FORMATS["onednn"]
    weight, bias = torch.randn(24, 16), torch.randn(24)
    finished = packed.finish(weight)
    for rows in (0, 1, 16, 17, 33, 129, 513):
        x, addend = torch.randn(rows, 16), torch.randn(rows, 24)
        for added in (None, addend):
            ours = packed.apply(x, finished, bias, added)
            assert ours.shape == (rows, 24)
            plain = dense.apply(x, weight, bias, added)
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_logits_of_few_rows_are_never_left_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small vocabulary is worth a split, but nothing behind the head adds parts."""
    pytest.importorskip("triton", reason="the operators need the triton package")
    from headrace.kernels.few_rows_settings import FewRowsSettings
    from headrace.layers import triton_operators

    settings = FewRowsSettings(weights=64, block=64, warps=4, stages=2, splits=4)
    monkeypatch.setattr(triton_operators, "_settings", lambda x, weight: settings)
    monkeypatch.setattr(torch, "mm", lambda x, weight, out_dtype: x.float() @ weight.float())
    operators = triton_operators.TritonOperators(pdl=False)
    head: Any = SimpleNamespace(matrix=torch.randn(10, 8, dtype=torch.bfloat16))
    hidden = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = hidden.float() @ head.matrix.float().t()
    torch.testing.assert_close(operators.logits(head, hidden), expected)
