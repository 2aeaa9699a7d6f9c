"""Weights as in the checkpoint, multiplied by the kernel whose rows have the same bits."""

from importlib import import_module
from typing import Any

from torch import Tensor

from headrace.layers.weight_formats import DenseFormat


class InvariantFormat(DenseFormat):
    """Products on a CUDA device that blocks ask of a layer itself and not of the operators.

    Args:
        pdl: programmatic dependent launch.
    """

    def __init__(self, *, pdl: bool) -> None:
        self._pdl = pdl
        room = "headrace.kernels.invariant_product_triton"
        self._product: Any = import_module(room).invariant_product

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None
    ) -> Tensor:
        product: Tensor = self._product(x, weight, bias=bias, residual=addend, pdl=self._pdl)
        return product
