"""act(gate) * up, in plain torch: the meaning of the Triton kernel (Shazeer, 2020)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def widened(x: Tensor) -> Tensor:
    """x in the type that sums are made in: float32, or float64 for float64."""
    return x if x.dtype is torch.float64 else x.float()


def summed(x: Tensor) -> Tensor:
    """Parts [S, T, N] of a sum -> [T, N], one added after another; [T, N] stays."""
    if x.dim() == 2:
        return x
    total = x[0]
    for part in x[1:]:
        total = total + part
    return total


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, any shape; nothing is rounded in between."""
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up


def gated_activation(
    x: Tensor,
    *,
    activation: Activation = "silu",
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """act(x[:, :I]) * x[:, I:], in float32 and rounded once.

    `layers.mlp` rounds the activation too: the two differ by one rounding of x's dtype.

    Args:
        x: [T, 2 I], gate then up; rows may be strided. Or parts of it, [S, T, 2 I] float32, of
            `few_rows`.
        activation: "silu", or "gelu_tanh" (the tanh form of GELU).
        out: [T, I], written and returned; allocated if absent.
        dtype: of the result, if `out` is absent: x's by default.

    Returns: [T, I].
    """
    gate, up = summed(widened(x)).chunk(2, dim=-1)
    result = gated(gate, up, activation).to(dtype or x.dtype)
    return result if out is None else out.copy_(result)
