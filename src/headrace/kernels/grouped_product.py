"""Products of rows with the matrix of their group, in plain torch: the meaning of the kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16  # bytes of a row that torch's product takes a multiple of


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """out[r] = weight[e] @ x[r] for the group e that row r belongs to.

    Args:
        x: [R, K], contiguous, sorted by group.
        weight: [E, N, K], contiguous.
        ends: [E] int32, where the rows of each group end; a group may have none. Rows behind the
            last end are undefined in the result.

    Returns: [R, N] in x's dtype, summed in float32.
    """
    inputs = x.shape[1]
    multiple = ALIGNMENT // x.element_size()
    if missing := -inputs % multiple:  # of no real model
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    product: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return product
