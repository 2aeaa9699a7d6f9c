"""Blocks of keys of one head, whole, by the tensor memory accelerator of Hopper and later GPUs.

A copy row by row costs every thread addresses and registers; a descriptor costs one thread one
instruction. A block must lie in one page, and a pool may have either layout of a page: head by head
for each token, or token by token for each head.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.attention_math_triton import padded


def takes_blocks(cache: Tensor, block: int) -> bool:
    """Whether a block of keys of one head is a rectangle in memory, as a descriptor needs it."""
    page_stride, slot_stride, head_stride, _ = cache.stride()
    rows = page_stride % slot_stride == 0 and (
        head_stride < slot_stride or head_stride % slot_stride == 0
    )
    aligned = slot_stride * cache.element_size() % 16 == 0 and cache.data_ptr() % 16 == 0
    page, _, dim = cache.shape[1:]
    return rows and aligned and page % block == 0 and padded(dim) == dim


def slots_of(cache: Tensor, block: int) -> TensorDescriptor:
    """The pool [P, page, K, D] of any strides as a matrix whose rows are a slot stride long."""
    page_stride, slot_stride, head_stride, _ = cache.stride()
    pages, _, heads, dim = cache.shape
    side_by_side = head_stride < slot_stride
    width = (heads - 1) * head_stride + dim if side_by_side else dim
    shape = [pages * (page_stride // slot_stride), width]
    return TensorDescriptor(cache, shape, [slot_stride, 1], [block, dim])


@triton.jit
def load_block(slots, page, place, kv_head, STRIDES: tl.constexpr):
    """[BLOCK, D] keys or values of one head from `place` of a page on; see `slots_of`."""
    row = page * (STRIDES[0] // STRIDES[1]) + place
    if STRIDES[2] < STRIDES[1]:
        block = slots.load([row, kv_head * STRIDES[2]])
    else:
        block = slots.load([row + kv_head * (STRIDES[2] // STRIDES[1]), 0])
    return block
