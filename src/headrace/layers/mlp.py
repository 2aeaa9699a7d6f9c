"""The gated feed-forward layer: down(act(gate(x)) * up(x)) (Shazeer, 2020)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from headrace.base.errors import UnsupportedError
from headrace.layers.linear import Linear, MergedLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.weights import WeightSpace


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that checkpoints call `name`; `UnsupportedError` lists what is known."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(
            f"Activation {name!r} (hidden_act) is not supported",
            remedy=f"Supported: {', '.join(ACTIVATIONS)}",
        )
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    def __init__(
        self, hidden: int, intermediate: int, *, act: str, bias: bool, space: WeightSpace
    ) -> None:
        super().__init__()
        self.operators = space.operators
        self.act_name = act
        self.intermediate = intermediate
        self.act = activation(act)
        self.gate_up_proj = MergedLinear(
            hidden, {"gate_proj": intermediate, "up_proj": intermediate}, bias=bias, space=space
        )
        self.down_proj = Linear(intermediate, hidden, bias=bias, space=space)

    def gate(self, norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """act(gate(norm(x))) * up(norm(x)) [T, intermediate], and x, as `Operators.normed_gate`"""
        return self.operators.normed_gate(norm, self, x)

    def add(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """x + down(act(gate(norm(x))) * up(norm(x))): the residual stream, [T, H], which may come
        and go in parts."""
        gated, x = self.gate(norm, x)
        return self.operators.add_linear(self.down_proj, gated, x)
