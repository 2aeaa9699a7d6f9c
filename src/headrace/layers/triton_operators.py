"""Compositions of layers by fused Triton kernels, and cuBLAS for products of several rows.

One row is bound by reading the weights, so its norm, residual and activation ride along with the
matrix-vector product. With more rows cuBLAS multiplies: the residual is its addend, the norm in
front and the activation behind are kernels of their own.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.layers.attention import SelfAttention
from headrace.layers.embedding import LMHead
from headrace.layers.linear import MergedLinear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.operators import TORCH_OPERATORS
from headrace.layers.rope import Rotation

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class TritonOperators:
    """Operators on a CUDA device, for weights kept dense.

    Args:
        pdl: programmatic dependent launch (compute capability 9.0 or newer).
    """

    name = "triton"

    def __init__(self, *, pdl: bool) -> None:
        room = "headrace.kernels"
        self._pdl = pdl
        self._matvec: Any = import_module(f"{room}.matvec_triton").matvec
        self._rms_norm: Any = import_module(f"{room}.norms_triton").rms_norm
        self._gated: Any = import_module(f"{room}.gated_activation_triton").gated_activation
        self._rotate: Any = import_module(f"{room}.norm_rope_write_triton").norm_rope_write

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        normed: Tensor = self._rms_norm(x, norm.weight, eps=norm.eps, pdl=self._pdl)
        return normed

    def normed_linear(self, norm: RMSNorm, linear: MergedLinear, x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            return linear.forward(self.norm(norm, x))
        product: Tensor = self._matvec(
            x,
            linear.weight,
            norm_weight=norm.weight,
            eps=norm.eps,
            bias=linear.bias,
            pdl=self._pdl,
        )
        return product

    def add_linear(self, linear: MergedLinear, x: Tensor, residual: Tensor) -> Tensor:
        weight = linear.weight
        assert weight is not None, "dense weights stay as they were loaded"
        if x.shape[0] == 1:
            total: Tensor = self._matvec(
                x, weight, bias=linear.bias, residual=residual, pdl=self._pdl
            )
            return total
        # In place: cuBLAS adds into its output, else the residual is copied there first.
        residual.addmm_(x, weight.t())
        return residual if linear.bias is None else residual.add_(linear.bias)

    def normed_gate(self, norm: RMSNorm, mlp: GatedMLP, x: Tensor) -> Tensor:
        activation = ACTIVATIONS.get(mlp.act_name)
        if activation is None:
            return TORCH_OPERATORS.normed_gate(norm, mlp, x)
        linear = mlp.gate_up_proj
        gated: Tensor
        if x.shape[0] == 1:
            gated = self._matvec(
                x,
                linear.weight,
                norm_weight=norm.weight,
                eps=norm.eps,
                bias=linear.bias,
                activation=activation,
                pdl=self._pdl,
            )
        else:
            both = linear.forward(self.norm(norm, x))
            gated = self._gated(both, activation=activation, pdl=self._pdl)
        return gated

    def rotate_and_write(
        self, attention: SelfAttention, qkv: Tensor, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        keys, values = attention.pool.key_value(attention.pool_layer)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        q: Tensor = self._rotate(
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
        )
        return q, None

    def logits(self, head: LMHead, hidden: Tensor) -> Tensor:
        matrix = head.matrix
        if hidden.shape[0] == 1:
            out = hidden.new_empty((1, matrix.shape[0]), dtype=torch.float32)
            logits: Tensor = self._matvec(hidden, matrix, out=out, pdl=self._pdl)
            return logits
        if hidden.dtype is torch.float32:
            return F.linear(hidden, matrix)
        return torch.mm(hidden, matrix.t(), out_dtype=torch.float32)
