"""A product for few rows with what lies around it, in plain torch: the meaning of the kernels."""

import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.gated_activation import Activation, gated, widened
from headrace.kernels.norms import rms_norm

MAX_ROWS = 16


def small_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """norm(x) @ weight^T + bias, then either + residual or act(gate) * up.

    Float32 from the first operand to the one rounding at the end. The layers round after each of
    their steps, so they differ from this by a rounding of x's dtype per step left out.

    Args:
        x: [m, K], 1 <= m <= 16.
        weight: [N, K], contiguous; with an activation the N = 2 I rows are gate, then up.
        norm_weight: [K], of x's dtype or float32: an RMSNorm of x stands in front.
        eps: of the norm.
        bias: [N].
        residual: [m, N], added behind; not together with an activation.
        activation: "silu" or "gelu_tanh" of the first I columns, times the last I.
        out: [m, N] or [m, I], written and returned; allocated if absent. It may be `residual`, and
            not x.

    Returns: [m, N], or [m, I] with an activation, in x's dtype.
    """
    assert 1 <= x.shape[0] <= MAX_ROWS
    assert residual is None or activation is None
    wide = widened(x)
    if norm_weight is not None:
        wide = rms_norm(wide, norm_weight, eps=eps)
    result = F.linear(wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype))
    if activation is not None:
        gate, up = result.chunk(2, dim=-1)
        result = gated(gate, up, activation)
    if residual is not None:
        result = result + residual.to(wide.dtype)
    result = result.to(x.dtype)
    return result if out is None else out.copy_(result)
