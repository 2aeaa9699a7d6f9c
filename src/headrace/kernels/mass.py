"""Probability mass in whole numbers.

Float additions depend on their order, and a library reduction picks its order by the shape of the
batch. Whole numbers add up to the same sum in any order: a row's mass cannot change with its
batch-mates, its device, or the kernel that adds.
"""

import torch
from torch import Tensor

MASS_BITS = 42  # the likeliest token weighs 2**42, so 2**20 tokens stay below 2**63
MAX_VOCABULARY = 1 << 20


def token_mass(logits: Tensor, peak: Tensor) -> Tensor:
    """exp(logits - peak) in units of 2**-42, rounded down, int64 of the shape of `logits`.

    Args:
        logits: [S, n] float32; -inf weighs 0.
        peak: [S, 1] float32, the largest logit of each row.
    """
    assert logits.shape[-1] <= MAX_VOCABULARY, "the sum of a row must fit into 63 bits"
    return (logits - peak).exp_().mul_(float(1 << MASS_BITS)).to(torch.int64)


def log_mass(total: Tensor) -> Tensor:
    """Natural logarithm, float64, of a sum of `token_mass` of any shape."""
    return (total.to(torch.float64) * 2.0**-MASS_BITS).log()
