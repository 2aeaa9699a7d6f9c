"""Work on some rows of a matrix and leave the others bit for bit as they are."""

from collections.abc import Callable

import torch
from torch import Tensor

RowIndex = Tensor | slice


def change_rows(
    values: Tensor, flags: Tensor, change: Callable[[Tensor, RowIndex], Tensor]
) -> Tensor:
    """`values` with `change` applied to the flagged rows; the input itself is not written.

    On the CPU only flagged rows are computed. On a device all are, and the unflagged results are
    dropped: asking which rows are flagged would make the host wait. `change` must therefore treat
    rows alone, so that both ways give the same bits.

    Args:
        values: [S, V].
        flags: [S] bool.
        change: takes the rows to change [s, V] and their index into S; returns [s, V], never
            writing into its argument.
    """
    if values.device.type != "cpu":
        return torch.where(flags[:, None], change(values, slice(None)), values)
    chosen = flags.nonzero().squeeze(1)
    if len(chosen) == 0:
        return values
    if len(chosen) == len(flags):
        return change(values, slice(None))
    changed = values.clone()
    changed[chosen] = change(values[chosen], chosen)
    return changed
