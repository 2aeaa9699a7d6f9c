"""Whether the Triton kernels can run here: the one place that tries the import.

Importing this file needs no Triton. The kernel files (`*_attention_triton.py`) do: import them
only after `triton_available` answered `None`.
"""

import torch

from headrace.base.decision import Refusal

_SUBJECT = "triton"
_DEPENDENT_LAUNCH = (9, 0)  # compute capability


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start there before the one in front has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH


def triton_available(device_type: str | None = None) -> Refusal | None:
    """Why the Triton kernels cannot run, or `None` when they can.

    Args:
        device_type: `torch.device.type` of the tensors, or `None` to ask for the package alone.
            On `cpu` only Triton's interpreter runs kernels; elsewhere only compiled ones run.
    """
    try:
        import triton
    except ImportError as error:
        return Refusal(
            subject=_SUBJECT,
            reason=f"the package cannot be imported ({error})",
            remedy="pip install 'headrace[cuda]'",
        )
    if device_type is None:
        return None
    interpreted = bool(triton.knobs.runtime.interpret)
    if device_type == "cpu" and not interpreted:
        return Refusal(
            subject=_SUBJECT,
            reason="Triton compiles for GPUs; on CPU tensors only its interpreter runs kernels",
            remedy="set TRITON_INTERPRET=1 before the start (slow, for tests), or use torch_native",
        )
    if device_type != "cpu" and interpreted:
        return Refusal(
            subject=_SUBJECT,
            reason=f"TRITON_INTERPRET is set: kernels would run on the host, not on {device_type}",
            remedy="unset TRITON_INTERPRET",
        )
    return None
