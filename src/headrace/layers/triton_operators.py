"""Compositions of layers by fused Triton kernels, and cuBLAS for products of many rows.

One row is bound by reading the weights, so its norm, residual and activation ride along with the
matrix-vector product. So are few rows, where a kernel of ours is measured to be faster: it adds the
residual or gates where a program sees whole sums, and else returns parts of the sums, which the
next kernel adds: the norm those of the residual stream, the rotation those of q, k, v, the
activation those of gate and up. With more rows cuBLAS multiplies: the residual is its addend, the
norm in front and the activation behind are kernels of their own.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.kernels.few_rows_settings import FewRowsSettings, few_rows_settings
from headrace.kernels.gated_activation import Activation
from headrace.layers.attention import SelfAttention
from headrace.layers.embedding import LMHead
from headrace.layers.linear import MergedLinear
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import Experts
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import Rotation

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


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
        self._few_rows: Any = import_module(f"{room}.few_rows_triton").few_rows
        norms = import_module(f"{room}.norms_triton")
        self._rms_norm: Any = norms.rms_norm
        self._sum_rms_norm: Any = norms.sum_rms_norm
        self._gated: Any = import_module(f"{room}.gated_activation_triton").gated_activation
        self._grouped: Any = import_module(f"{room}.grouped_product_triton").grouped_product
        self._rotate: Any = import_module(f"{room}.norm_rope_write_triton").norm_rope_write

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return self.normed(norm, x)[0]

    def normed(self, norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, named = norm.weight, {"eps": norm.eps, "pdl": self._pdl}
        if x.dim() == 2:
            return self._rms_norm(x, weight, **named), x
        normed, total = self._sum_rms_norm(x, weight, dtype=norm.dtype, **named)
        return normed, total

    def normed_linear(
        self, norm: RMSNorm, linear: MergedLinear, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        if x.shape[0] != 1:
            normed, x = self.normed(norm, x)
            return self._product(linear, normed), x
        product: Tensor = self._matvec(
            x,
            linear.weight,
            norm_weight=norm.weight,
            eps=norm.eps,
            bias=linear.bias,
            pdl=self._pdl,
        )
        return product, x

    def add_linear(self, linear: MergedLinear, x: Tensor, residual: Tensor) -> Tensor:
        weight = _weight(linear)
        addends = {"bias": linear.bias, "residual": residual, "pdl": self._pdl}
        total: Tensor
        if x.shape[0] == 1:
            total = self._matvec(x, weight, **addends)
        elif settings := _settings(x, weight):
            total = self._few_rows(x, weight, settings=settings, **addends)
        else:
            # In place: cuBLAS adds into its output, else the residual is copied there first.
            total = residual.addmm_(x, weight.t())
            total = total if linear.bias is None else total.add_(linear.bias)
        return total

    def normed_gate(self, norm: RMSNorm, mlp: GatedMLP, x: Tensor) -> tuple[Tensor, Tensor]:
        linear, activation = mlp.gate_up_proj, ACTIVATIONS.get(mlp.act_name)
        gated: Tensor
        if x.shape[0] == 1 and activation is not None:
            gated = self._matvec(
                x,
                linear.weight,
                norm_weight=norm.weight,
                eps=norm.eps,
                bias=linear.bias,
                activation=activation,
                pdl=self._pdl,
            )
            return gated, x
        normed, x = self.normed(norm, x)
        if activation is None:
            gate, up = linear.forward(normed).split(mlp.intermediate, dim=-1)
            return mlp.act(gate) * up, x
        settings = _settings(normed, _weight(linear))
        if settings is not None and settings.splits == 1:
            gated = self._product(linear, normed, activation=activation)
        else:
            both = self._product(linear, normed)
            gated = self._gated(both, activation=activation, dtype=x.dtype, pdl=self._pdl)
        return gated, x

    def _product(
        self, linear: MergedLinear, x: Tensor, activation: Activation | None = None
    ) -> Tensor:
        """linear(x) of several rows, maybe in parts; gated where an activation is given."""
        weight = _weight(linear)
        settings = _settings(x, weight)
        if settings is None:
            assert activation is None
            return linear.forward(x)
        product: Tensor = self._few_rows(
            x, weight, settings=settings, bias=linear.bias, activation=activation, pdl=self._pdl
        )
        return product

    def expert_gate(self, experts: Experts, x: Tensor, ends: Tensor) -> Tensor:
        both = self._grouped(x, experts.gate_up, ends)
        activation = ACTIVATIONS.get(experts.act_name)
        gated: Tensor
        if activation is None:
            gate, up = both.split(experts.intermediate, dim=-1)
            gated = experts.act(gate) * up
        else:
            gated = self._gated(both, activation=activation, pdl=self._pdl)
        return gated

    def expert_down(self, experts: Experts, x: Tensor, ends: Tensor) -> Tensor:
        down: Tensor = self._grouped(x, experts.down, ends)
        return down

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
            dtype=_weight(attention.qkv_proj).dtype,
            pdl=self._pdl,
        )
        return q, None

    def logits(self, head: LMHead, hidden: Tensor) -> Tensor:
        matrix, settings = head.matrix, _settings(hidden, head.matrix)
        logits: Tensor
        if hidden.shape[0] == 1:
            out = hidden.new_empty((1, matrix.shape[0]), dtype=torch.float32)
            logits = self._matvec(hidden, matrix, out=out, pdl=self._pdl)
        elif settings is not None and settings.splits == 1:  # nothing behind would add parts
            logits = self._few_rows(
                hidden, matrix, settings=settings, dtype=torch.float32, pdl=self._pdl
            )
        elif hidden.dtype is torch.float32:
            logits = F.linear(hidden, matrix)
        else:
            logits = torch.mm(hidden, matrix.t(), out_dtype=torch.float32)
        return logits


def _weight(linear: MergedLinear) -> Tensor:
    assert linear.weight is not None, "dense weights stay as they were loaded"
    return linear.weight


def _settings(x: Tensor, weight: Tensor) -> FewRowsSettings | None:
    """How our kernel multiplies x by the weights; `None`: cuBLAS does, float32 always."""
    if x.dtype is torch.float32:
        return None
    return few_rows_settings(x.shape[0], weight.shape[0], weight.shape[1], x.device)
