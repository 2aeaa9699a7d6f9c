"""What the fused kernels share: dependent launch, activations, argument checks.

Programmatic dependent launch: a kernel may start while the one in front still runs. Every kernel
of such a chain waits, in every program, before it reads what an earlier kernel wrote and before it
writes anything; what is constant (weights, norms, tables of angles) is read before. Since each
kernel ends after its own wait, one wait covers the whole chain in front.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.support_triton import has_dependent_launch, triton_available

LOG2_E = tl.constexpr(1.4426950408889634)
TWICE_ROOT_2_PI = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
LINE_BYTES = tl.constexpr(128)


@triton.jit
def begin(PDL: tl.constexpr):
    """Lets the next kernel come as soon as this one leaves room."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Until all kernels in front have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, or gelu by tanh, since 0.5 (1 + tanh u) is sigmoid(2 u); float32."""
    inner = x if ACTIVATION == "silu" else (x + 0.044715 * x * x * x) * TWICE_ROOT_2_PI
    return x / (1.0 + tl.exp2(inner * -LOG2_E))


@triton.jit
def prefetch(lines, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    """Asks for rows [ROWS] of SIZE elements to come to the L2, and waits for nothing."""
    STEP: tl.constexpr = LINE_BYTES // (lines.dtype.element_ty.primitive_bitwidth // 8)
    place = tl.minimum(tl.arange(0, SIZE_PAD // STEP) * STEP, SIZE - 1)
    addresses = (lines[:, None] + place[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def next_power(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a launch says of programmatic dependent launch; the interpreter knows no such option."""
    return {"launch_pdl": True} if pdl else {}


def check_fused(name: str, x: Tensor, *, pdl: bool) -> None:
    """Refuses a device or dtype that the fused kernels do not take.

    Raises:
        UnsupportedError: no way to run Triton there, another dtype, or `pdl` before Hopper.
    """
    if refusal := triton_available(x.device.type):
        raise UnsupportedError(
            f"{name} by Triton cannot run on {x.device.type}",
            why=refusal.reason,
            remedy=refusal.remedy,
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"{name} by Triton got {x.dtype}", why="it takes float32, bfloat16 and float16"
        )
    if pdl and not has_dependent_launch(x.device):
        raise UnsupportedError(
            f"{name} cannot use programmatic dependent launch on {x.device}",
            why="it needs an NVIDIA GPU of compute capability 9.0 or newer",
            remedy="call it with pdl=False",
        )
