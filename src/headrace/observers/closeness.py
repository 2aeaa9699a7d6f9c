"""How far what a step wrote lies from what it should have written; device operations only."""

import torch
from torch import Tensor

LEAST = 1e-30  # of a divisor


def worst_token(real: Tensor, reference: Tensor, live: Tensor) -> Tensor:
    """The token that differs most, by how much of its size.

    A token of small size is held against the usual size of the live tokens, since what went into
    it was of that size. NaN where the reference has a number is infinitely wrong; nothing is said
    where the reference has none.

    Args:
        real, reference: [T, ...], any float dtype. live: [T] bool.

    Returns: [2] float64, error and place; zeros where no token is live.
    """
    reference = reference.flatten(1).float()  # [T, n]
    size = reference.norm(dim=1)
    live = live & size.isfinite()
    usual = torch.where(live, size, 0).square().sum().div(live.sum().clamp_min(1)).sqrt()
    distance = (real.flatten(1).float() - reference).norm(dim=1)
    return torch.stack(_largest(distance / torch.maximum(size, usual).clamp_min(LEAST), live))


def worst_logits(real: Tensor, reference: Tensor, live: Tensor) -> Tensor:
    """The row that differs most, in standard deviations of its logits.

    Args:
        real, reference: [S, V] float32. live: [S] bool.

    Returns: [4] float64: root mean square of the differences of the worst row, its place, the
        largest single difference of any row, and the same in numbers.
    """
    live = live & reference.isfinite().all(1)
    spread = reference.std(1).clamp_min(LEAST)  # [S]
    difference = real - reference
    mean = difference.norm(dim=1) / reference.shape[1] ** 0.5
    single = difference.abs_().amax(1)
    error, place = _largest(mean / spread, live)
    return torch.stack(
        (error, place, _largest(single / spread, live)[0], _largest(single, live)[0])
    )


def _largest(error: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    error = error.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(~live, 0)
    value, place = error.max(0)
    return value.double(), place.double()
