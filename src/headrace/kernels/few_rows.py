"""The product of few rows, maybe as parts that are not added yet, in plain torch: the meaning."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.gated_activation import Activation, gated, widened


def few_rows(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    dtype: torch.dtype | None = None,
    splits: int = 1,
) -> Tensor:
    """x @ weight^T + bias, then either + residual or act(gate) * up.

    Float32 from the first operand to the one rounding at the end. With splits nothing is rounded:
    the result are parts whose sum over the first dimension is the product, and who reads them adds
    them (`summed`). Bias and residual are in the first part.

    Args:
        x: [T, K], rows may be strided.
        weight: [N, K], contiguous; with an activation the N = 2 I rows are gate, then up.
        bias: [N].
        residual: [T, N], added behind; not together with an activation.
        activation: "silu" or "gelu_tanh" of the first I columns, times the last I; without splits.
        dtype: of the result without splits: x's, if absent, or float32.
        splits: equal parts of K, up to a block.

    Returns: [T, N], or [T, I] with an activation; with splits [splits, T, N] float32.
    """
    assert residual is None or activation is None
    assert splits == 1 or activation is None
    wide, matrix = widened(x), widened(weight)
    ranges = torch.arange(x.shape[1]).tensor_split(splits)
    parts = torch.stack([F.linear(wide[:, part], matrix[:, part]) for part in ranges])
    for addend in (bias, residual):
        if addend is not None:
            parts[0] += addend
    if splits > 1:
        return parts
    result = parts[0]
    if activation is not None:
        gate, up = result.chunk(2, dim=-1)
        result = gated(gate, up, activation)
    return result.to(dtype or x.dtype)
