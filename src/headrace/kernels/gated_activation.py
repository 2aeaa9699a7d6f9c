"""act(gate) * up, in plain torch: the meaning of the Triton kernel (Shazeer, 2020)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def widened(x: Tensor) -> Tensor:
    """x in the type that sums are made in: float32, or float64 for float64."""
    return x if x.dtype is torch.float64 else x.float()


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, any shape; nothing is rounded in between."""
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up


def gated_activation(
    x: Tensor, *, activation: Activation = "silu", out: Tensor | None = None
) -> Tensor:
    """act(x[:, :I]) * x[:, I:], in float32 and rounded once.

    `layers.mlp` rounds the activation too: the two differ by one rounding of x's dtype.

    Args:
        x: [T, 2 I], gate then up; rows may be strided.
        activation: "silu", or "gelu_tanh" (the tanh form of GELU).
        out: [T, I], written and returned; allocated if absent.

    Returns: [T, I] in x's dtype.
    """
    gate, up = widened(x).chunk(2, dim=-1)
    result = gated(gate, up, activation).to(x.dtype)
    return result if out is None else out.copy_(result)
