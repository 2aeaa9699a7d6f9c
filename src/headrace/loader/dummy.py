"""Random weights of a sane scale, for benchmarks and tests without a checkpoint."""

import torch
from torch import nn

from headrace.layers.weights import weight_slots


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Fill every parameter from `seed`, the same on every device.

    Matrices get a standard deviation of 1 / sqrt(columns), so that activations and logits keep a
    size of about 1; vectors (norm weights, biases) get 1 for norms and small noise for biases.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, slot in sorted(weight_slots(model).items()):
            target = slot.destination
            noise = torch.randn(target.shape, generator=generator)
            if target.dim() >= 2:
                target.copy_(noise / target.shape[-1] ** 0.5)
            elif name.endswith(".bias"):
                target.copy_(noise * 0.02)
            else:
                target.copy_(1.0 + noise * 0.02)
