"""Compositions of layers by Triton kernels whose rows have the same bits in any batch.

A token goes through the same operations, in the same order and with the same roundings, whatever
else is in its step: products sum each number in one chain (`invariant_product_triton`), whose
tiles follow the number of rows and whose bits do not; norm and rotation work row by row, in one
form for all numbers of rows. What is rounded, once each: the norm; q, k, v before their norm and
rotation, and behind it; the gated product; the residual stream behind each product. Logits never.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.batch.forward_batch import ForwardBatch
from headrace.layers.attention import SelfAttention
from headrace.layers.embedding import LMHead
from headrace.layers.linear import MergedLinear
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import Experts
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import Rotation
from headrace.layers.triton_operators import ACTIVATIONS

ALIGNMENT = 16  # bytes


class DeterministicTritonOperators:
    """Operators on a CUDA device, for weights kept dense.

    Args:
        pdl: programmatic dependent launch (compute capability 9.0 or newer).
    """

    name = "triton_deterministic"

    def __init__(self, *, pdl: bool) -> None:
        room = "headrace.kernels"
        self._pdl = pdl
        self._product: Any = import_module(f"{room}.invariant_product_triton").invariant_product
        self._rms_norm: Any = import_module(f"{room}.norms_triton").rms_norm
        self._rotation: Any = import_module(f"{room}.norm_rope_write_triton")

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        # How wide a kernel reads follows the alignment, and the order of its sum follows that.
        rows = x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
        normed: Tensor = self._rms_norm(rows, norm.weight, eps=norm.eps, pdl=self._pdl)
        return normed

    def normed(self, norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(norm, x), x

    def normed_linear(
        self, norm: RMSNorm, linear: MergedLinear, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._linear(linear, self.norm(norm, x)), x

    def add_linear(self, linear: MergedLinear, x: Tensor, residual: Tensor) -> Tensor:
        return self._linear(linear, x, residual=residual)

    def normed_gate(self, norm: RMSNorm, mlp: GatedMLP, x: Tensor) -> tuple[Tensor, Tensor]:
        normed, activation = self.norm(norm, x), ACTIVATIONS.get(mlp.act_name)
        if activation is not None:
            return self._linear(mlp.gate_up_proj, normed, activation=activation), x
        gate, up = self._linear(mlp.gate_up_proj, normed).split(mlp.intermediate, dim=-1)
        return mlp.act(gate) * up, x

    def _linear(self, linear: MergedLinear, x: Tensor, **behind: Any) -> Tensor:
        assert linear.weight is not None, "dense weights stay as they were loaded"
        product: Tensor = self._product(x, linear.weight, bias=linear.bias, pdl=self._pdl, **behind)
        return product

    def expert_gate(self, experts: Experts, x: Tensor, ends: Tensor) -> Tensor:
        raise _no_experts()

    def expert_down(self, experts: Experts, x: Tensor, ends: Tensor) -> Tensor:
        raise _no_experts()

    def rotate_and_write(
        self, attention: SelfAttention, qkv: Tensor, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """As `Operators.rotate_and_write`; keys and values are always read from the pool."""
        keys, values = attention.pool.key_value(attention.pool_layer)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        rotation_kernel = self._rotation
        largest = max(attention.head_dim, attention.v_head_dim)
        q: Tensor = rotation_kernel.norm_rope_write(
            qkv,
            rotation.cache,
            rotation.positions,
            keys,
            values,
            batch.kv[attention.kv_group].out_cache_loc,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            pdl=self._pdl,
            # Every step takes the form of many tokens.
            tile=rotation_kernel.tile_tokens(rotation_kernel.MANY_TOKENS, largest),
        )
        return q, None

    def logits(self, head: LMHead, hidden: Tensor) -> Tensor:
        logits: Tensor = self._product(hidden, head.matrix, dtype=torch.float32, pdl=self._pdl)
        return logits


def _no_experts() -> UnsupportedError:
    return UnsupportedError(
        "A mixture of experts has no batch-invariant product on GPUs",
        why="rows of an expert are multiplied in tiles that follow their number",
        remedy="leave deterministic off",
    )
