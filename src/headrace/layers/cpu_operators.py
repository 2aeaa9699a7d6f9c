"""Compositions of layers on a CPU, where a step of one row is bound by the number of operators.

Between two products lie a dozen operators of some microseconds each; with one row most of them can
be fewer. Several rows take the plain way. The numbers are those of `TorchOperators` up to rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.layers.attention import SelfAttention
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.operators import TorchOperators
from headrace.layers.rope import Rotation


class CpuOperators(TorchOperators):
    name = "cpu"

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if x.shape[0] != 1 or x.dim() != 2:
            return super().norm(norm, x)
        row = x.view(-1).float()
        # The host may look on a CPU: one dot product instead of a mean of squares.
        scale = (torch.dot(row, row).item() / norm.shape[0] + norm.eps) ** -0.5
        return (row * norm.weight).mul_(scale).to(x.dtype).view(1, -1)

    def normed_gate(self, norm: RMSNorm, mlp: GatedMLP, x: Tensor) -> tuple[Tensor, Tensor]:
        if mlp.act is not F.silu:
            return super().normed_gate(norm, mlp, x)
        both = mlp.gate_up_proj.forward(self.norm(norm, x))  # [T, 2 * intermediate]
        gate, up = both[:, : mlp.intermediate], both[:, mlp.intermediate :]
        return F.silu(gate).mul_(up), x

    def rotate_and_write(
        self, attention: SelfAttention, qkv: Tensor, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        whole = rotation.cache.shape[1] == attention.head_dim
        if qkv.shape[0] != 1 or attention.q_norm is not None or not whole:
            return super().rotate_and_write(attention, qkv, rotation, batch)
        # All heads of a token turn by the same angles: one small product for q and k.
        heads = qkv[:, : attention.rotating].view(-1, attention.head_dim)  # [N + K, D]
        turned = torch.mm(heads.float(), rotation.matrix).to(qkv.dtype)
        v = qkv[:, attention.rotating :].view(1, attention.num_kv_heads, attention.v_head_dim)
        q, k = turned[None, : attention.num_heads], turned[None, attention.num_heads :]
        slots = batch.kv[attention.kv_group].out_cache_loc
        attention.pool.write(attention.pool_layer, slots, k, v)
        return q, None
