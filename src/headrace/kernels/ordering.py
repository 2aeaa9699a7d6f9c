"""The one order of tokens: larger logit first, equal logits by lower id.

Arg-max, top-n lists, ranks and filters all mean this order. A float32 and its token id are packed
into one int64 key, so keys are unique and every comparison or selection on them is exact and
settles ties the same way on any device.
"""

import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF


def order_keys(logits: Tensor) -> Tensor:
    """Keys of logits [S, V] float32 as [S, V] int64: a larger key comes earlier in the order.

    The bits of a float32 ordered as an integer (the magnitude of negative numbers flipped) in the
    high half, minus the token id. -0 counts as 0. NaN has some place, the same on every call.
    """
    bits = (logits + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered.to(torch.int64) << 32).sub_(ids)


def largest(logits: Tensor, count: int, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The first `count` tokens of each row in order: values and ids [S, count].

    Args:
        logits: [S, V] float32.
        count: 0 to V; V sorts the row.
        keys: `order_keys(logits)` where the caller has them already.
    """
    if keys is None:
        keys = order_keys(logits)
    if count == logits.shape[-1]:
        ids = keys.sort(dim=-1, descending=True).indices
    else:
        ids = keys.topk(count, dim=-1).indices
    return logits.gather(-1, ids), ids
