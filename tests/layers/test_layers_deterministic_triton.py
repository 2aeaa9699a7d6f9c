"""The operators of deterministic mode on GPUs: the numbers of the plain ones, row by row alike."""

from typing import Any

import pytest
import torch
from test_layers_operators import DIM, HEADS, HIDDEN, KV_HEADS, decode_batch, filled, space, traits

from headrace.base.errors import UnsupportedError
from headrace.config.plan import RopePlan
from headrace.kernels.support_triton import triton_available
from headrace.layers.attention import SelfAttention
from headrace.layers.deterministic_triton_operators import DeterministicTritonOperators
from headrace.layers.embedding import LMHead
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.operators import TORCH_OPERATORS, Operators
from headrace.layers.rope import RotaryEmbedding
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool

pytestmark = pytest.mark.skipif(
    triton_available("cpu") is not None, reason="needs Triton's interpreter"
)
ROWS = 5


@pytest.fixture(scope="module")
def operators() -> DeterministicTritonOperators:
    return DeterministicTritonOperators(pdl=False)


def assert_rows_alike(compute: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Each row alone has the bits that it has among the others; returns all of them."""
    whole: torch.Tensor = compute(*inputs)
    for row in range(ROWS):
        alone = compute(*(each[row : row + 1] for each in inputs))
        assert torch.equal(alone, whole[row : row + 1])
    return whole


@pytest.mark.parametrize("act", ["silu", "relu"])
def test_norms_products_and_gates(operators: DeterministicTritonOperators, act: str) -> None:
    norm = filled(RMSNorm(HIDDEN, eps=0.1, space=space()))
    mlp = filled(GatedMLP(HIDDEN, 40, act=act, bias=True, space=space()))
    x, residual = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    gated = TORCH_OPERATORS.normed_gate(norm, mlp, x)[0]

    def compositions(by: Operators) -> list[tuple[Any, ...]]:
        return [
            (lambda rows: by.norm(norm, rows), x),
            (lambda rows: by.normed_linear(norm, mlp.gate_up_proj, rows)[0], x),
            (lambda rows: by.normed_gate(norm, mlp, rows)[0], x),
            (lambda rows, stream: by.add_linear(mlp.down_proj, rows, stream), gated, residual),
        ]

    for plain, ours in zip(compositions(TORCH_OPERATORS), compositions(operators), strict=True):
        expected = plain[0](*plain[1:])
        torch.testing.assert_close(assert_rows_alike(*ours), expected, rtol=1e-4, atol=1e-4)
    assert operators.normed(norm, x)[1] is operators.normed_gate(norm, mlp, x)[1] is x


def test_a_row_that_lies_anywhere(operators: DeterministicTritonOperators) -> None:
    """Alignment decides how a kernel reads, and so the order of a sum: it may not."""
    norm = filled(RMSNorm(HIDDEN, eps=0.1, space=space()))
    room = torch.randn(ROWS * HIDDEN + 1)
    x = room[1:].view(ROWS, HIDDEN)
    assert x.data_ptr() % 16 != 0
    assert torch.equal(operators.norm(norm, x), operators.norm(norm, x.clone()))
    seen: list[int] = []
    kernel = operators._rms_norm
    operators._rms_norm = lambda rows, *rest, **named: seen.append(rows.data_ptr() % 16)
    operators.norm(norm, x)
    operators._rms_norm = kernel
    assert seen == [0]


def test_logits_are_float32(operators: DeterministicTritonOperators) -> None:
    head = filled(LMHead(30, HIDDEN, tied=None, soft_cap=None, space=space()))
    hidden = torch.randn(ROWS, HIDDEN)
    logits = assert_rows_alike(lambda rows: operators.logits(head, rows), hidden)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, hidden @ head.matrix.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_rotation_writes_the_pool_and_nothing_is_fresh(
    operators: DeterministicTritonOperators, qk_norm: bool
) -> None:
    model = traits(qk_norm=qk_norm, rotary_dim=DIM)
    attention = filled(SelfAttention(model, 0, space=space()))
    rope = RotaryEmbedding(RopePlan(traits=model.ropes["default"], length=32), space=space())
    qkv = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * DIM)
    positions, slots = torch.tensor([9, 4, 30, 0, 7]), torch.tensor([5, 2, 7, 9, 4])
    tiles: list[int] = []

    def run(by: Operators, rows: slice = slice(None)) -> list[torch.Tensor]:
        shape = {"num_layers": 1, "num_pages": 3, "page_size": 4, "num_kv_heads": KV_HEADS}
        pool = MHATokenToKVPool(
            Arena("cpu"), **shape, head_dim=DIM, v_head_dim=DIM, dtype=torch.float32
        )
        for part in pool.key_value(0):
            part.zero_()
        attention.pool, attention.pool_layer = pool, 0
        batch = decode_batch(slots[rows])
        q, fresh = by.rotate_and_write(attention, qkv[rows], rope(positions[rows]), batch)
        assert by is not operators or fresh is None
        return [q, *(part.flatten(0, 1)[slots] for part in pool.key_value(0))]

    ours = run(operators)
    for plain, own in zip(run(TORCH_OPERATORS), ours, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-4)
    rotation = operators._rotation
    kernel = rotation.norm_rope_write
    try:
        rotation.norm_rope_write = lambda *given, tile, **named: (
            tiles.append(tile) or kernel(*given, tile=tile, **named)
        )
        for row in range(ROWS):
            alone = run(operators, slice(row, row + 1))
            assert torch.equal(alone[0][0], ours[0][row])
            assert torch.equal(alone[1][row], ours[1][row])
        run(operators)
    finally:
        rotation.norm_rope_write = kernel
    assert len(set(tiles)) == 1


def test_experts_are_refused(operators: DeterministicTritonOperators) -> None:
    nothing: Any = None
    for product in (operators.expert_gate, operators.expert_down):
        with pytest.raises(UnsupportedError, match="mixture of experts"):
            product(nothing, torch.ones(1, 1), torch.ones(1))
