"""Root-mean-square norm in plain torch: the meaning of the Triton kernels (Zhang & Sennrich, 2019).

The numbers are those of `layers.norm`: float32 throughout, weight included, and one rounding. The
weight is taken as it is: a model whose checkpoint stores w of 1 + w adds the 1 when it loads.
"""

import torch
from torch import Tensor

from headrace.kernels.gated_activation import summed, widened


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: [T, H], or [T, N, D] for a norm of each head; the last dimension is contiguous.
        weight: [H] or [D], of x's dtype or float32.
        out: x's shape, written and returned; allocated if absent. It may be x.

    Returns: x's shape and dtype.
    """
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    result = (wide * scale * weight.to(wide.dtype)).to(x.dtype)
    return result if out is None else out.copy_(result)


def sum_rms_norm(
    parts: Tensor, weight: Tensor, *, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The step between two sublayers: parts of a sum added and rounded, and the norm of that.

    Args:
        parts: [S, T, H] float32, of `few_rows`: the residual is in them.
        weight: [H], of the result's dtype or float32.
        dtype: of the results.

    Returns: (norm of the sum, the sum), [T, H] each.
    """
    total = summed(parts).to(dtype)
    return rms_norm(total, weight, eps=eps), total
