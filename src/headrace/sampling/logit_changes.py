"""What changes logits before the temperature: penalties, bias, forbidden tokens.

Each function takes logits [S, V] float32 and the rows [S] int64 they belong to, and returns new
logits (or the same tensor where no row needs a change); rows that use nothing keep their bits.
"""

import torch
from torch import Tensor

from headrace.batch.rows import IN_PROMPT, Rows
from headrace.batch.sampling_batch_info import TokenMask
from headrace.kernels.row_selection import RowIndex, change_rows

_FORBIDDEN = float("-inf")


def penalise(logits: Tensor, rows: Rows, index: Tensor) -> Tensor:
    """Repetition penalty over prompt and output, then frequency and presence over the output.

    Repetition divides positive and multiplies other logits (CTRL, Keskar et al. 2019); frequency is
    subtracted once per occurrence, presence once (OpenAI).
    """

    def change(part: Tensor, selected: RowIndex) -> Tensor:
        row = index[selected]
        counts = rows.token_counts[row]  # [s, V]
        made = counts & (IN_PROMPT - 1)
        repetition = rows.repetition[row, None]
        repeated = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(counts != 0, repeated, part)
        part = part - made.to(part.dtype) * rows.frequency[row, None]
        return part - (made > 0).to(part.dtype) * rows.presence[row, None]

    return change_rows(logits, rows.penalised[index], change)


def add_bias(logits: Tensor, rows: Rows, index: Tensor) -> Tensor:
    """Add each row's bias; -inf forbids a token."""

    def change(part: Tensor, selected: RowIndex) -> Tensor:
        return part + rows.bias[index[selected]]

    return change_rows(logits, rows.biased[index], change)


def forbid_stops(logits: Tensor, rows: Rows, index: Tensor, positions: Tensor) -> Tensor:
    """Forbid the stop ids of rows that have not made their `min_tokens` yet.

    Args:
        positions: [S] int64, index of the token being sampled.
    """
    stop_ids = rows.stop_ids[index]  # [S, MAX_ROW_STOP_IDS], packed to the front, then -1
    early = (positions < rows.min_length[index]) & (stop_ids[:, 0] >= 0)
    # Padding repeats the first id: the same value is written again and nothing else is touched.
    stop_ids = torch.where(stop_ids >= 0, stop_ids, stop_ids[:, :1]).clamp_(min=0)
    values = logits.gather(-1, stop_ids).masked_fill_(early[:, None], _FORBIDDEN)
    return logits.scatter(-1, stop_ids, values)


def forbid(logits: Tensor, mask: TokenMask) -> Tensor:
    """Forbid what the mask does not allow, in the rows that bring one."""
    eight = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    octets = mask.bits.view(torch.uint8)  # [M, 4 W], least significant first
    forbidden = (octets[:, :, None] & eight == 0).flatten(1)[:, : logits.shape[-1]]  # [M, V]
    narrowed = logits.index_select(0, mask.index).masked_fill_(forbidden, _FORBIDDEN)
    return logits.index_copy(0, mask.index, narrowed)
