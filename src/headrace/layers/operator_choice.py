"""Which operators a model uses: settled once, with the reason."""

import torch

from headrace.base.decision import Decision, Refusal
from headrace.kernels.support_triton import has_dependent_launch, triton_available
from headrace.layers.cpu_operators import CpuOperators
from headrace.layers.deterministic_operators import DeterministicCpuOperators
from headrace.layers.deterministic_triton_operators import DeterministicTritonOperators
from headrace.layers.operators import TORCH_OPERATORS, Operators
from headrace.layers.row_blocks import RowBlockFormat
from headrace.layers.triton_operators import TritonOperators
from headrace.layers.weight_formats import InvariantFormat, WeightFormat


def choose_operators(
    device: torch.device, weight_format: str, *, deterministic: bool = False
) -> tuple[Decision[str], Operators]:
    """Fused kernels where they run, torch elsewhere.

    Args:
        deterministic: those whose rows have the same bits in any batch; the plan has refused
            devices without them.
    """
    if deterministic:
        return _deterministic_operators(device)
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


def deterministic_format(
    form: WeightFormat, device: torch.device, dtype: torch.dtype
) -> WeightFormat:
    """`form` with products in which a row has the same bits whatever is beside it."""
    if device.type == "cpu":
        return RowBlockFormat(form, dtype)
    return InvariantFormat(pdl=has_dependent_launch(device))


def _deterministic_operators(device: torch.device) -> tuple[Decision[str], Operators]:
    operators: Operators
    if device.type == "cpu":
        operators = DeterministicCpuOperators()
    else:
        operators = DeterministicTritonOperators(pdl=has_dependent_launch(device))
    reason = "a row has the same bits whatever is beside it"
    return Decision(name="operators", value=operators.name, reason=reason), operators
