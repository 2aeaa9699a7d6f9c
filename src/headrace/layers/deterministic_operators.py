"""Compositions of layers on a CPU whose rows have the same bits whatever is beside them.

Products are the weight format's affair (`row_blocks`). Here it is the functions of single numbers
and the sums within a row. torch computes SiLU, GELU and the sigmoid of the last few numbers of a
thread's share by other code than the rest, so a number's result depends on its place; the
exponential and tanh of float32 it computes by one, and +, -, *, / are exact everywhere. A sum over
the contiguous last dimension is made for each row alone, in an order that its length settles.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.operators import TorchOperators

GELU_SCALE, GELU_CUBE = 0.7978845608028654, 0.044715  # sqrt(2 / pi), Hendrycks & Gimpel, 2016


class DeterministicCpuOperators(TorchOperators):
    """Float32 within an operator, one rounding behind it."""

    name = "cpu_deterministic"

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps)
        return (rows * scale).mul_(norm.weight.float()).to(x.dtype).view(x.shape)

    def normed_gate(self, norm: RMSNorm, mlp: GatedMLP, x: Tensor) -> tuple[Tensor, Tensor]:
        both = mlp.gate_up_proj.forward(self.norm(norm, x)).float()
        gate, up = both.split(mlp.intermediate, dim=-1)
        return (ACTIVATIONS[mlp.act_name](gate) * up).to(x.dtype), x


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5))


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = GELU_SCALE * (x + GELU_CUBE * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu,
}
