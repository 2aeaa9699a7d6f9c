"""From rows to the tensors of a step, and from sampled tokens back to rows (torch twins).

Every function takes and writes device tensors only and never waits for the device. Shapes: R rows
in all, B sequences and T tokens of the step, S sampling sequences.
"""

import torch
from torch import Tensor


def gather_decode(
    rows: Tensor, last_token: Tensor, length: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of a decode step.

    Args:
        rows: [B] int64.
        last_token, length, active: columns [R] int64, int32, bool.

    Returns:
        input_ids [B] int64, positions [B] int64, seq_lens [B] int32 after the step. A row that is
        not active has length 0: backends give zeros for it and it reads no page.
    """
    live = active[rows]
    before = length[rows]
    return last_token[rows], before.long(), torch.where(live, before + 1, 0)


def gather_extend(
    rows: Tensor,
    new_tokens: Tensor,
    prompt_tokens: Tensor,
    last_token: Tensor,
    length: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a step whose sequences bring any number of new tokens.

    Args:
        rows: [B] int64.
        new_tokens: [B] int32, tokens each sequence brings; their sum is T.
        prompt_tokens: [T] int64, -1 where the row's last token stands.

    Returns:
        input_ids [T], positions [T], owner [T] (place among the B sequences), all int64, and
        seq_lens, extend_lens, prefix_lens [B] int32. The three are 0 for a row that is not active.
    """
    total = prompt_tokens.shape[0]
    live = active[rows]
    before = length[rows]
    start = torch.cumsum(new_tokens, 0) - new_tokens
    owner = torch.repeat_interleave(new_tokens.long(), output_size=total)
    offset = torch.arange(total, device=rows.device) - start[owner]
    positions = before[owner].long() + offset
    input_ids = torch.where(prompt_tokens < 0, last_token[rows][owner], prompt_tokens)
    extend_lens = torch.where(live, new_tokens, 0)
    prefix_lens = torch.where(live, before, 0)
    return input_ids, positions, owner, prefix_lens + extend_lens, extend_lens, prefix_lens


def write_slots(
    rows: Tensor, positions: Tensor, active: Tensor, table: Tensor, page_size: int
) -> Tensor:
    """Slot of each new token: table[row, position // page] * page + position % page.

    Args:
        rows, positions: [T] int64, row and position of each token.
        table: [R, max pages] int32.

    Returns:
        [T] int64; slot 0 for tokens of rows that are not active.
    """
    page = table[rows, positions // page_size].long()
    return torch.where(active[rows], page * page_size + positions % page_size, 0)


def advance_length(rows: Tensor, new_tokens: Tensor, length: Tensor, active: Tensor) -> None:
    """length += new tokens for the live rows; `new_tokens` [B] int32. Row 0 stays 0."""
    length[rows] += torch.where(active[rows], new_tokens, 0)


def advance_token(
    rows: Tensor,
    tokens: Tensor,
    finite: Tensor,
    *,
    last_token: Tensor,
    active: Tensor,
    stop_ids: Tensor,
    penalised: Tensor,
    token_counts: Tensor,
) -> None:
    """Write sampled tokens to their rows; a stop id or a failed row clears `active`.

    Args:
        rows: [S] int64; tokens: [S] int64; finite: [S] bool.
        stop_ids: column [R, n] int64 padded with -1; token_counts: column [R, V] int32.
    """
    live = active[rows]
    last_token[rows] = torch.where(live, tokens, last_token[rows])
    counted = (live & penalised[rows]).to(torch.int32)
    places = rows * token_counts.shape[1] + tokens
    token_counts.view(-1).index_add_(0, places, counted)
    stopped = (stop_ids[rows] == tokens[:, None]).any(1)
    active[rows] = live & finite & ~stopped
