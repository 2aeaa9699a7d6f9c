"""How the weights of a linear layer are kept and multiplied.

A format makes the memory that the loader fills, may turn it into another form once it is full, and
computes the product. Packed formats of checkpoints (fp8, int4, GGUF blocks) will be more of these.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.base.decision import Decision, Refusal

if TYPE_CHECKING:
    from headrace.layers.weights import WeightSpace


class WeightFormat(Protocol):
    """One way to keep a matrix [outputs, inputs]."""

    name: str

    def create(self, space: "WeightSpace", outputs: int, inputs: int) -> nn.Parameter:
        """Memory for the loader to fill."""
        ...

    def finish(self, weight: Tensor) -> Tensor:
        """The form that `apply` takes; called when the weight is loaded, which may be freed."""
        ...

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None
    ) -> Tensor:
        """x [T, inputs] -> [T, outputs] in x's dtype; takes the finished or the loaded form.

        `addend` [T, outputs] is added to the product.
        """
        ...


class DenseFormat:
    """In the model's dtype, row-major as in the checkpoint."""

    name = "dense"

    def create(self, space: "WeightSpace", outputs: int, inputs: int) -> nn.Parameter:
        return space.parameter(outputs, inputs)

    def finish(self, weight: Tensor) -> Tensor:
        return weight

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None
    ) -> Tensor:
        product = F.linear(x, weight, bias)
        return product if addend is None else addend + product


class OneDnnFormat(DenseFormat):
    """Blocks as oneDNN's kernels read them, on the CPU.

    torch's own product reads rows, which wastes memory bandwidth with one token and orders blocks
    anew at every call with more. A token's result does not depend on the number of tokens beside
    it (in float32 with one exception: alone, where the input has more than about 1000 columns).
    The operators are those that torch.compile's freezing uses.
    """

    name = "onednn"

    def finish(self, weight: Tensor) -> Tensor:
        # without a hint of the batch size the layout suits one token and many alike
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        return packed

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None
    ) -> Tensor:
        if weight.layout is torch.strided:  # not finished
            return super().apply(x, weight, bias, addend)
        rows = x.shape[0]
        missing = padded_rows(rows) - rows
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
            addend = None if addend is None else F.pad(addend, (0, 0, 0, missing))
        linear = torch.ops.mkldnn._linear_pointwise
        product: Tensor
        if addend is None:
            product = linear.default(x, weight, bias, "none", [], "")
        else:
            product = linear.binary(x, addend, weight, bias, "add")
        return product[:rows] if missing else product


def padded_rows(rows: int) -> int:
    """Rows that a product is made with: oneDNN compiles and keeps code for every number of them,
    a quarter of a megabyte each, so there must not be many numbers."""
    if rows <= 16:
        return rows
    step = 16 if rows <= 1024 else 64
    return -(-rows // step) * step


class InvariantFormat(DenseFormat):
    """As dense, multiplied on a CUDA device by the kernel whose rows have the same bits in any
    batch: products that blocks ask of a layer itself and not of the operators.

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


DENSE = DenseFormat()
_ONEDNN = OneDnnFormat()
WEIGHT_FORMATS: dict[str, WeightFormat] = {form.name: form for form in (DENSE, _ONEDNN)}


def choose_weight_format(device: torch.device, dtype: torch.dtype) -> Decision[str]:
    """Name in `WEIGHT_FORMATS` for linear layers on this device.

    Measured on 2 busy cores of an AMD EPYC with AVX-512, a decode step of SmolLM2-135M, dense
    against onednn in ms: bfloat16 31 : 24, float32 51 : 33 (medians, interleaved, torch 2.13).
    """
    refusal = _onednn_refusal(device, dtype)
    if refusal is not None:
        return Decision(
            name="weight_format",
            value=DENSE.name,
            reason="weights as in the checkpoint",
            refused=(refusal,),
        )
    return Decision(
        name="weight_format",
        value=_ONEDNN.name,
        reason="oneDNN's block order reads memory faster on the CPU",
    )


def _onednn_refusal(device: torch.device, dtype: torch.dtype) -> Refusal | None:
    reason = ""
    if device.type != "cpu":
        reason = f"its kernels run on the CPU, not on {device.type}"
    elif not torch.backends.mkldnn.is_available():
        reason = "this build of torch has no oneDNN"
    elif dtype not in (torch.float32, torch.bfloat16):
        reason = f"not made for {dtype}"
    elif dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        reason = "this CPU has no bfloat16 instructions"
    return Refusal(subject=_ONEDNN.name, reason=reason) if reason else None
