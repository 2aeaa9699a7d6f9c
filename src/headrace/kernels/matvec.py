"""The product of one row with what lies around it, in plain torch: the meaning of the kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.gated_activation import Activation, gated, widened
from headrace.kernels.norms import rms_norm


def matvec(
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
        x: [1, K]; more rows are a matrix product's affair.
        weight: [N, K], contiguous; with an activation the N = 2 I rows are gate, then up.
        norm_weight: [K], of x's dtype or float32: an RMSNorm of x stands in front.
        eps: of the norm.
        bias: [N].
        residual: [1, N], added behind; not together with an activation.
        activation: "silu" or "gelu_tanh" of the first I columns, times the last I.
        out: [1, N] or [1, I], of x's dtype or float32 (logits, which are not rounded), written and
            returned; allocated in x's dtype if absent. It may be `residual`, and not x.

    Returns: [1, N], or [1, I] with an activation.
    """
    assert x.shape[0] == 1
    assert residual is None or activation is None
    assert out is None or out.dtype in (x.dtype, torch.float32)
    wide = widened(x)
    if norm_weight is not None:
        wide = rms_norm(wide, norm_weight, eps=eps)
    result = F.linear(wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype))
    if activation is not None:
        gate, up = result.chunk(2, dim=-1)
        result = gated(gate, up, activation)
    if residual is not None:
        result = result + residual.to(wide.dtype)
    return result.to(x.dtype) if out is None else out.copy_(result)
