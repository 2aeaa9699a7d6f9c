"""Top-k, top-p and min-p. In the order of tokens (`ordering`) each keeps a first part of the row,
so the three together are one number: how many tokens stay.
"""

import torch
from torch import Tensor

from headrace.kernels.mass import token_mass
from headrace.kernels.ordering import largest
from headrace.kernels.row_selection import RowIndex, change_rows, host_may_look

# On the CPU, first tokens looked at, in turn, before a row is sorted whole: most nuclei are small.
_CPU_WIDTHS = (128, 2048)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits with the tokens that the filters drop at -inf; the input is not written.

    The filters run one after the other, each on what the one before left and renormalised, as in
    transformers' chain of warpers:
      - top-k keeps the k first tokens, exactly k: ties at the k-th go to lower ids;
      - top-p keeps the fewest first tokens whose probability *among those top-k left* reaches p,
        the token that crosses p included;
      - min-p keeps tokens at least min_p times as likely as the likeliest.
    A row with all filters off comes out bit for bit as it went in, and no row depends on another.

    Args:
        logits: [S, V] float32, already divided by the temperature.
        top_k: [S] integers; 0 or less, or V and more: off.
        top_p: [S] float32; 1: off.
        min_p: [S] float32; 0: off.
    """
    vocabulary = logits.shape[-1]
    on = ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0) | (min_p > 0.0)

    def change(part: Tensor, index: RowIndex) -> Tensor:
        return _filter(part, top_k[index], top_p[index], min_p[index])

    return change_rows(logits, on, change)


def _filter(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    vocabulary = logits.shape[-1]
    top_k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).to(torch.int64)
    widths = [*(width for width in _CPU_WIDTHS if width < vocabulary), vocabulary]
    if not host_may_look(logits):
        widths = [vocabulary]  # to learn which rows are settled the host would have to wait
    filtered, settled = _keep_first(logits, top_k, top_p, min_p, widths[0])
    for width in widths[1:]:
        rest = (~settled).nonzero().squeeze(1)
        if len(rest) == 0:
            break
        part, settled_part = _keep_first(
            logits.index_select(0, rest), top_k[rest], top_p[rest], min_p[rest], width
        )
        filtered.index_copy_(0, rest, part)
        settled.index_copy_(0, rest, settled_part)
    return filtered


def _keep_first(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Filtered logits [S, V], and [S] bool: whether the `width` first tokens decided the row."""
    values, ids = largest(logits, width)  # [S, width]
    peak = values[:, :1]
    mass = token_mass(values, peak)
    rank = torch.arange(width, device=logits.device)
    within_k = rank < top_k[:, None]
    whole = top_k >= logits.shape[-1]
    all_mass = token_mass(logits, peak).sum(-1) if width < logits.shape[-1] else mass.sum(-1)
    total = torch.where(whole, all_mass, (mass * within_k).sum(-1))
    before = mass.cumsum(-1) - mass  # mass of the tokens that come earlier
    wanted = top_p.to(torch.float64) * total.to(torch.float64)
    # p = 1 is off and keeps tokens too unlikely to have a mass.
    within_p = (before.to(torch.float64) < wanted[:, None]) | (top_p >= 1.0)[:, None]
    likely = (values - peak).exp_() >= min_p[:, None]
    keep = (within_k & within_p & likely) | (rank == 0)  # whatever rounds to 0, one token stays
    filtered = torch.full_like(logits, float("-inf"))
    filtered.scatter_(-1, ids, values.masked_fill(~keep, float("-inf")))
    # A token dropped among the candidates ends the row, if the mass it was measured by is known.
    mass_known = whole | (top_k <= width) | (top_p >= 1.0)
    return filtered, mass_known & ((top_k <= width) | ~keep[:, -1])
