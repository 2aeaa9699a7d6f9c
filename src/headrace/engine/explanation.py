"""Everything an engine decided, with its reasons, as one object to print or to read."""

from dataclasses import dataclass

from headrace.base.decision import Decision
from headrace.config.hardware import Hardware
from headrace.config.persona import Persona
from headrace.config.plan import Plan
from headrace.runner.assembly import Settled
from headrace.runner.memory_table import MemoryTable, memory_table
from headrace.runner.model_runner import ModelRunner, StartupPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Persona, hardware, plan and memory; what was measured is empty before a start."""

    persona: Persona
    hardware: Hardware
    plan: Plan
    memory: MemoryTable
    measured: tuple[Decision[int], ...] = ()
    startup: tuple[StartupPart, ...] = ()


def explanation_of(settled: Settled, runner: ModelRunner | None = None) -> Explanation:
    """What is known of a settled plan and, once there is one, of its runner."""
    return Explanation(
        persona=settled.persona,
        hardware=settled.hardware,
        plan=settled.plan,
        memory=memory_table(settled.persona, settled.hardware, settled.plan),
        measured=tuple(runner.measured) if runner else (),
        startup=tuple(runner.startup) if runner else (),
    )
