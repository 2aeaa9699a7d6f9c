"""A block of a model by the Triton operators is the block in torch, whichever products are ours."""

import pytest
import torch
from fused_cases import DEVICE
from torch import Tensor

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.config.persona import AttentionTraits, LayerTraits, ModelTraits, RopeTraits
from headrace.config.plan import RopePlan
from headrace.kernels import few_rows_settings
from headrace.kernels.few_rows_settings import FewRowsSettings
from headrace.layers.embedding import LMHead
from headrace.layers.operators import TORCH_OPERATORS, Operators
from headrace.layers.rope import RotaryEmbedding
from headrace.layers.weights import WeightSpace, finish_weights
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool
from headrace.models.decoder import PreNormBlock, norm
from headrace.models.gemma3 import SandwichBlock

pytest.importorskip("triton", reason="the kernels need the triton package")
layers = pytest.importorskip("headrace.layers.triton_operators")

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, ROWS = 96, 80, 4, 2, 16, 70, 3
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}
WHOLE = FewRowsSettings(weights=128, block=32, warps=4, stages=2)
SPLIT = FewRowsSettings(weights=64, block=32, warps=4, stages=2, splits=2)


class Still:
    """Attention that gives back the queries."""

    def forward(self, q: Tensor, *_: object, **__: object) -> Tensor:
        return q


def traits(family: str) -> ModelTraits:
    attention = AttentionTraits(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        scale=1.0,
        qk_norm=True,
        qkv_bias=True,
        output_bias=True,
    )
    rope = RopeTraits(kind="default", theta=100.0, rotary_dim=DIM, max_position=32)
    return ModelTraits(
        family=family,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        vocab_size=VOCAB,
        attention=attention,
        layers=(LayerTraits(kv_group="full"),) * 2,
        ropes={"default": rope},
        norm_eps=1e-5,
        activation="silu" if family == "llama" else "gelu_pytorch_tanh",
        norm_offset=0.0 if family == "llama" else 1.0,
        tie_word_embeddings=False,
        max_position=32,
    )


def run(operators: Operators, family: str, rows: int) -> tuple[Tensor, ...]:
    """Logits and the pool after two blocks."""
    arena, model = Arena(DEVICE), traits(family)
    space = WeightSpace(dtype=torch.float16, arena=arena, operators=operators)
    kind = PreNormBlock if family == "llama" else SandwichBlock
    blocks = [kind(model, index, space=space) for index in range(2)]
    last, head = norm(model, space), LMHead(VOCAB, HIDDEN, space=space)
    pool = MHATokenToKVPool(
        arena,
        num_layers=2,
        num_pages=3,
        page_size=4,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.float16,
    )
    generator = torch.Generator().manual_seed(0)
    for module in (*blocks, last, head):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0
            drawn = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(drawn)
        finish_weights(module)
    slots = torch.tensor([5, 4, 9], device=DEVICE)[:rows]
    rotation = RotaryEmbedding(RopePlan(traits=model.ropes["default"], length=32), space=space)(
        slots
    )
    x = torch.randn(rows, HIDDEN, generator=generator).half().to(DEVICE)
    for index, block in enumerate(blocks):
        for part in pool.key_value(index):
            part.zero_()
        block.self_attn.bind(pool, Still(), index)
        x = block(x, rotation, decode_batch(slots))
    return head(last(x)), *pool.key_value(0), *pool.key_value(1)


def decode_batch(slots: Tensor) -> ForwardBatch:
    rows, mode = len(slots), ForwardMode.DECODE
    table = torch.zeros(rows, 1, dtype=torch.int32, device=slots.device)
    group = KvGroup(name="full", page_size=4, page_table=table, out_cache_loc=slots)
    return ForwardBatch(
        mode=mode,
        rows=slots,
        bounds=HostBounds(seq_lens=[32] * rows, extend_lens=[1] * rows),
        facts=BatchFacts(mode=mode, tokens=rows, live_tokens=rows, sequences=rows, max_length=32),
        kv={"full": group},
    )


@pytest.mark.parametrize(
    ("family", "ours"),
    [
        ("llama", dict.fromkeys(SHAPES, SPLIT)),
        ("llama", dict.fromkeys(SHAPES, WHOLE)),
        ("llama", {"o": SPLIT, "gate_up": WHOLE}),
        ("llama", {"down": SPLIT, "qkv": SPLIT}),
        ("llama", {}),
        ("gemma", {"qkv": SPLIT, "gate_up": SPLIT}),
    ],
)
def test_blocks_agree(family, ours, monkeypatch):
    # Float32 logits of float16 operands by cuBLAS exist on CUDA alone: the head is always ours.
    ours = ours | {"head": WHOLE}
    measured = {SHAPES[name]: {16: settings} for name, settings in ours.items()}
    monkeypatch.setattr(few_rows_settings, "MEASURED", measured)
    operators = layers.TritonOperators(pdl=False)
    for result, expected in zip(
        run(operators, family, ROWS), run(TORCH_OPERATORS, family, ROWS), strict=True
    ):
        assert result.dtype is expected.dtype
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
