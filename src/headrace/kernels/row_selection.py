"""Work on some rows of a matrix and leave the others bit for bit as they are."""

from collections.abc import Callable

import torch
from torch import Tensor

RowIndex = Tensor | slice

# Elements worked on at a time: on the CPU what stays in its cache, on a device what bounds scratch.
_CPU_ELEMENTS = 1 << 17
_DEVICE_ELEMENTS = 1 << 24


def host_may_look(values: Tensor) -> bool:
    """Whether the host can read `values` without waiting for a device."""
    return values.device.type == "cpu"


def rows_at_a_time(values: Tensor) -> int:
    """How many rows of `values` [S, V] to work on at once, at least 1."""
    elements = _CPU_ELEMENTS if host_may_look(values) else _DEVICE_ELEMENTS
    return max(1, elements // values.shape[-1])


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
    if not host_may_look(values):
        return torch.where(flags[:, None], change(values, slice(None)), values)
    chosen = flags.nonzero().squeeze(1)
    if len(chosen) == 0:
        return values
    if len(chosen) == len(flags):
        return change(values, slice(None))
    changed = values.clone()
    changed.index_copy_(0, chosen, change(values.index_select(0, chosen), chosen))
    return changed
