"""Which operators a model uses: settled once, with the reason."""

import torch

from headrace.base.decision import Decision, Refusal
from headrace.kernels.support_triton import has_dependent_launch, triton_available
from headrace.layers.cpu_operators import CpuOperators
from headrace.layers.operators import TORCH_OPERATORS, Operators
from headrace.layers.triton_operators import TritonOperators


def choose_operators(device: torch.device, weight_format: str) -> tuple[Decision[str], Operators]:
    """Fused kernels where they run, torch elsewhere."""
    reason, remedy = "", ""
    if device.type == "cpu":
        decision = Decision(
            name="operators", value="cpu", reason="few operators where a step has one row"
        )
        return decision, CpuOperators()
    if device.type != "cuda":
        reason = f"the fused kernels run on cuda, not on {device.type}"
    elif missing := triton_available(device.type):
        reason, remedy = missing.reason, missing.remedy
    elif weight_format != "dense":
        reason = f"the fused kernels read dense weights, not {weight_format}"
    if reason:
        refused = Refusal(subject="triton", reason=reason, remedy=remedy)
        decision = Decision(
            name="operators", value="torch", reason="layer by layer", refused=(refused,)
        )
        return decision, TORCH_OPERATORS
    pdl = has_dependent_launch(device)
    launch = "with" if pdl else "without"
    decision = Decision(
        name="operators", value="triton", reason=f"fused, {launch} programmatic dependent launch"
    )
    return decision, TritonOperators(pdl=pdl)
