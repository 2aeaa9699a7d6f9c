"""Log-probabilities and ranks of tokens, without the log-softmax of the whole vocabulary."""

import torch
from torch import Tensor

from headrace.kernels.mass import log_mass, token_mass
from headrace.kernels.ordering import largest, order_keys
from headrace.kernels.row_selection import rows_at_a_time

_PASSES = 32  # this many passes over a row cost about one sort of it

LogprobTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def token_logprobs(
    logits: Tensor, chosen: Tensor, top: int, token_ids: Tensor | None = None
) -> LogprobTensors:
    """Log-softmax of the chosen tokens, of the likeliest, and of tokens asked by id.

    The rank of a token counts from 1 in the order of `ordering`: 1 + tokens with a larger logit +
    tokens with the same logit and a lower id. A row's result does not depend on the others.

    Args:
        logits: [S, V] float32; -inf is allowed and gives -inf.
        chosen: [S] int64.
        top: likeliest tokens to return per row, n = min(top, V).
        token_ids: [S, M] int64, padded with -1 (a padded place gives the numbers of token 0).

    Returns:
        chosen [S] float32, rank [S] int64, top values [S, n] float32, top ids [S, n] int64, then
        values [S, M] and ranks [S, M] of `token_ids`, `None` when there are none.
    """
    top = min(top, logits.shape[-1])
    step = rows_at_a_time(logits)  # bounds the scratch when a long prompt asks
    parts = [
        _logprobs_of(
            logits[start : start + step],
            chosen[start : start + step],
            top,
            None if token_ids is None else token_ids[start : start + step],
        )
        for start in range(0, max(1, len(logits)), step)
    ]
    if len(parts) == 1:
        return parts[0]
    values, ranks, top_values, top_ids, extra, extra_ranks = zip(*parts, strict=True)
    return (
        torch.cat(values),
        torch.cat(ranks),
        torch.cat(top_values),
        torch.cat(top_ids),
        None if token_ids is None else torch.cat(extra),
        None if token_ids is None else torch.cat(extra_ranks),
    )


def _logprobs_of(
    logits: Tensor, chosen: Tensor, top: int, token_ids: Tensor | None
) -> LogprobTensors:
    peak = logits.amax(-1, keepdim=True)  # [S, 1]
    normaliser = log_mass(token_mass(logits, peak).sum(-1, keepdim=True))  # [S, 1] float64
    keys = order_keys(logits)
    wanted = chosen[:, None] if token_ids is None else torch.cat([chosen[:, None], token_ids], 1)
    wanted = wanted.clamp(min=0)  # [S, 1 + M]
    wanted_keys = keys.gather(-1, wanted)
    ranks = _ranks(keys, wanted_keys)
    values = _subtract(logits.gather(-1, wanted), peak, normaliser)
    top_values, top_ids = largest(logits, top, keys)
    top_values = _subtract(top_values, peak, normaliser)
    if token_ids is None:
        return values[:, 0], ranks[:, 0], top_values, top_ids, None, None
    return values[:, 0], ranks[:, 0], top_values, top_ids, values[:, 1:], ranks[:, 1:]


def _ranks(keys: Tensor, wanted: Tensor) -> Tensor:
    """1 + keys [S, V] larger than each of `wanted` [S, W]: one pass each, or a sort when many."""
    if wanted.shape[1] <= _PASSES:
        return torch.stack([1 + (keys > key[:, None]).sum(-1) for key in wanted.unbind(1)], 1)
    ascending = keys.sort(dim=-1).values
    return keys.shape[-1] + 1 - torch.searchsorted(ascending, wanted.contiguous(), right=True)


def _subtract(values: Tensor, peak: Tensor, normaliser: Tensor) -> Tensor:
    above = values.to(torch.float64) - peak.to(torch.float64)
    return (above - normaliser).to(torch.float32)
