"""Where the memory of a device will go, from the plan alone: the table `explain` prints.

The runner replaces "may be spent" by what it measures once the weights are loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.base.errors import CapacityError
from headrace.config.hardware import Hardware
from headrace.config.persona import Persona
from headrace.config.plan import Plan
from headrace.memory.budget import BudgetLine, spendable_line
from headrace.runner.memory_sizes import (
    fixed_bytes,
    kv_budget,
    kv_bytes_per_token,
    spendable_bytes,
    weight_bytes,
)

# Driver context and library workspaces of one process on a GPU: an estimate for devices not seen.
GPU_CONTEXT_BYTES = 768 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Bytes of one device by purpose.

    Attributes:
        device_bytes: total memory the table was made for.
        weights: bytes of the parameters by part of the model.
        kv_bytes_per_token: all KV groups together.
        lines: what the budget spends, in order; `str` prints it below the weights.
        tokens: KV tokens that fit; 0 when nothing does.
        reason: what set `tokens`.
        shortage: why the plan does not fit; empty when it does.
    """

    device_bytes: int
    weights: Mapping[str, int]
    kv_bytes_per_token: int
    lines: tuple[BudgetLine, ...]
    tokens: int
    reason: str
    shortage: str = ""

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in self.weights.items())
        head = (
            BudgetLine(name="device memory", bytes=self.device_bytes),
            BudgetLine(name="weights", bytes=self.weight_bytes, note=parts),
        )
        text = [str(line) for line in (*head, *self.lines)]
        text.append(f"KV per token {self.kv_bytes_per_token:,} bytes; {self._verdict()}")
        return "\n".join(text)

    def _verdict(self) -> str:
        if self.shortage:
            return f"does not fit: {self.shortage}"
        return f"{self.tokens:,} tokens fit ({self.reason})"


def memory_table(persona: Persona, hardware: Hardware, plan: Plan) -> MemoryTable:
    """Spend the memory of `hardware` as the plan says; never raises: a shortage is in the table."""
    traits = persona.traits
    weights = weight_bytes(traits, plan.dtype.value)
    left = hardware.memory_bytes - sum(weights.values())
    free = max(left, 0) if plan.device.value == "cpu" else left - GPU_CONTEXT_BYTES
    spendable = spendable_bytes(plan, free=free, total=hardware.memory_bytes)
    lines: tuple[BudgetLine, ...]
    try:
        budget = kv_budget(traits, plan, spendable)
    except CapacityError as error:
        fixed = fixed_bytes(traits, plan)
        lines = (
            spendable_line(spendable),
            *(BudgetLine(name=name, bytes=count) for name, count in fixed.items()),
        )
        tokens, reason, shortage = 0, "", str(error)
    else:
        lines, tokens, reason, shortage = budget.lines, budget.tokens, budget.reason, ""
    return MemoryTable(
        device_bytes=hardware.memory_bytes,
        weights=weights,
        kv_bytes_per_token=kv_bytes_per_token(traits, plan.kv_cache_dtype.value),
        lines=lines,
        tokens=tokens,
        reason=reason,
        shortage=shortage,
    )
