"""How the compositions that blocks are made of are computed: plain torch, or fused kernels.

A block says what it means (`normed_linear`, `add_linear`, ...); which kernels do it is settled once
for the whole model. Both ways give the same numbers up to rounding.
"""

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.grouped_product import grouped_product

if TYPE_CHECKING:
    from headrace.batch.forward_batch import ForwardBatch
    from headrace.layers.attention import SelfAttention
    from headrace.layers.embedding import LMHead
    from headrace.layers.linear import MergedLinear
    from headrace.layers.mlp import GatedMLP
    from headrace.layers.moe import Experts
    from headrace.layers.norm import RMSNorm
    from headrace.layers.rope import Rotation


class Operators(Protocol):
    """Compositions of layers. Shapes: T tokens, H hidden, N query heads, D head dim.

    The residual stream and the product before attention may stand in parts, [S, T, ...] float32,
    that are not added yet: operators that return such take them again, and add them where they read
    them anyhow. What reads the stream therefore returns it too, added.
    """

    name: str

    def norm(self, norm: "RMSNorm", x: Tensor) -> Tensor:
        """[T, H], maybe in parts, -> [T, H]"""
        ...

    def normed(self, norm: "RMSNorm", x: Tensor) -> tuple[Tensor, Tensor]:
        """norm(x), and x, both [T, H]; x may come in parts."""
        ...

    def normed_linear(
        self, norm: "RMSNorm", linear: "MergedLinear", x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """linear(norm(x)) [T, outputs], maybe in parts, and x [T, H], which may come in parts."""
        ...

    def add_linear(self, linear: "MergedLinear", x: Tensor, residual: Tensor) -> Tensor:
        """residual + linear(x): [T, inputs], [T, H] -> [T, H], maybe in parts; `residual` may be
        written."""
        ...

    def normed_gate(self, norm: "RMSNorm", mlp: "GatedMLP", x: Tensor) -> tuple[Tensor, Tensor]:
        """act(gate(norm(x))) * up(norm(x)) [T, intermediate], and x [T, H], which may come in
        parts."""
        ...

    def expert_gate(self, experts: "Experts", x: Tensor, ends: Tensor) -> Tensor:
        """act(gate(x)) * up(x) [R, I] of each row's expert: x [R, H] is sorted by expert, and the
        rows of each end at `ends` [E] int32."""
        ...

    def expert_down(self, experts: "Experts", x: Tensor, ends: Tensor) -> Tensor:
        """down(x) [R, H] of each row's expert; x [R, I] and `ends` as in `expert_gate`."""
        ...

    def rotate_and_write(
        self, attention: "SelfAttention", qkv: Tensor, rotation: "Rotation", batch: "ForwardBatch"
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """q [T, N, D], normed and rotated; k and v go to the pool, and are returned when fresh.
        `qkv` may come in parts.

        Fresh: every row of the step starts at position 0, so that attention need not read the pool.
        """
        ...

    def logits(self, head: "LMHead", hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V] float32, without soft cap."""
        ...


class TorchOperators:
    """Layer by layer, in torch: any device, any weight format. The meaning of the others."""

    name = "torch"

    def norm(self, norm: "RMSNorm", x: Tensor) -> Tensor:
        if x.dtype is norm.weight.dtype:
            return F.rms_norm(x, norm.shape, norm.weight, norm.eps)
        return F.rms_norm(x.float(), norm.shape, norm.weight, norm.eps).to(x.dtype)

    def normed(self, norm: "RMSNorm", x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(norm, x), x

    def normed_linear(
        self, norm: "RMSNorm", linear: "MergedLinear", x: Tensor
    ) -> tuple[Tensor, Tensor]:
        return linear.forward(self.norm(norm, x)), x

    def add_linear(self, linear: "MergedLinear", x: Tensor, residual: Tensor) -> Tensor:
        return linear.forward(x, residual)

    def normed_gate(self, norm: "RMSNorm", mlp: "GatedMLP", x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = mlp.gate_up_proj.forward(self.norm(norm, x)).split(mlp.intermediate, dim=-1)
        return mlp.act(gate) * up, x

    def expert_gate(self, experts: "Experts", x: Tensor, ends: Tensor) -> Tensor:
        both = grouped_product(x, experts.gate_up, ends)
        gate, up = both.split(experts.intermediate, dim=-1)
        gated: Tensor = experts.act(gate) * up
        return gated

    def expert_down(self, experts: "Experts", x: Tensor, ends: Tensor) -> Tensor:
        return grouped_product(x, experts.down, ends)

    def rotate_and_write(
        self, attention: "SelfAttention", qkv: Tensor, rotation: "Rotation", batch: "ForwardBatch"
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        tokens, heads = qkv.shape[0], (attention.num_heads, attention.num_kv_heads)
        # q and k lie side by side, so one rotation turns both
        qk = qkv[:, : attention.rotating].view(tokens, sum(heads), attention.head_dim)
        v = qkv[:, attention.rotating :].view(tokens, heads[1], attention.v_head_dim)  # [T, K, Dv]
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = qk.split(heads, dim=1)
            qk = torch.cat((self.norm(attention.q_norm, q), self.norm(attention.k_norm, k)), dim=1)
        q, k = rotation.apply(qk).split(heads, dim=1)  # [T, N, D], [T, K, D]
        slots = batch.kv[attention.kv_group].out_cache_loc
        attention.pool.write(attention.pool_layer, slots, k, v)
        fresh = batch.mode.is_extend and not batch.facts.has_prefix
        return q, (k, v) if fresh else None

    def logits(self, head: "LMHead", hidden: Tensor) -> Tensor:
        return head.format.apply(hidden, head.matrix, None).float()


TORCH_OPERATORS = TorchOperators()
