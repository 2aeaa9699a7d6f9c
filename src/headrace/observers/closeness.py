"""How far what a step wrote lies from what it should have written; device operations only."""

import torch
from torch import Tensor

LEAST = 1e-30  # of a divisor


def token_errors(real: Tensor, reference: Tensor, live: Tensor) -> Tensor:
    """Of each token, by how much of its size it differs.

    A token of small size is held against the usual size of the live tokens, since what went into
    it was of that size. NaN where the reference has a number is infinitely wrong; nothing is said
    where the reference has none.

    Args:
        real, reference: [T, ...], any float dtype. live: [T] bool.

    Returns: [T] float32, 0 where a token is not live.
    """
    reference = reference.flatten(1).float()  # [T, n]
    size = reference.norm(dim=1)
    live = live & size.isfinite()
    usual = torch.where(live, size, 0).square().sum().div(live.sum().clamp_min(1)).sqrt()
    distance = (real.flatten(1).float() - reference).norm(dim=1)
    return _told(distance / torch.maximum(size, usual).clamp_min(LEAST), live)


def logit_errors(real: Tensor, reference: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row, how far its logits differ.

    Args:
        real, reference: [S, V] float32. live: [S] bool.

    Returns: [S] float32 each: the root mean square of a row's differences and its largest one,
        both in standard deviations of the row's logits, and the largest one in numbers.
    """
    live = live & reference.isfinite().all(1)
    spread = reference.std(1).clamp_min(LEAST)  # [S]
    difference = real - reference
    mean = difference.norm(dim=1) / reference.shape[1] ** 0.5
    single = difference.abs_().amax(1)
    return _told(mean / spread, live), _told(single / spread, live), _told(single, live)


def worst(errors: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of [n] errors and its place, both float64."""
    value, place = errors.max(0)
    return value.double(), place.double()


def worst_times(errors: Tensor, allowed: Tensor) -> Tensor:
    """The error that exceeds its bound most.

    Args:
        errors, allowed: [n]; `allowed` is above 0.

    Returns: [3] float64: by how many times, its place, and the error itself.
    """
    times, place = worst((errors / allowed).nan_to_num(nan=0.0, posinf=torch.inf))
    return torch.stack((times, place, errors.index_select(0, place.long().view(1))[0].double()))


def _told(error: Tensor, live: Tensor) -> Tensor:
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(~live, 0)
