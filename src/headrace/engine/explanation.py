"""Everything an engine decided, with its reasons, as one object to print or to read."""

from dataclasses import dataclass, fields
from typing import Any

from headrace.base.decision import Decision, Refusal
from headrace.config.hardware import Hardware
from headrace.config.persona import Persona
from headrace.config.plan import Plan
from headrace.engine.options import default_params, unheeded_defaults
from headrace.request.sampling_params import SamplingParams
from headrace.runner.assembly import Settled
from headrace.runner.memory_table import MemoryTable, memory_table
from headrace.runner.model_runner import ModelRunner
from headrace.runner.report import render
from headrace.runner.startup import StartupPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Persona, hardware, plan and memory; what was measured is empty before a start."""

    persona: Persona
    hardware: Hardware
    plan: Plan
    memory: MemoryTable
    measured: tuple[Decision[Any], ...] = ()
    startup: tuple[StartupPart, ...] = ()
    sampling_defaults: Decision[dict[str, Any]]

    def __str__(self) -> str:
        defaults = self.sampling_defaults
        lines = (str(defaults), *(f"not {refusal}" for refusal in defaults.refused))
        return "\n  ".join((f"{render(self)}\n\nSampling", *lines))


def explanation_of(settled: Settled, runner: ModelRunner | None = None) -> Explanation:
    """What is known of a settled plan and, once there is one, of its runner."""
    return Explanation(
        persona=settled.persona,
        hardware=settled.hardware,
        plan=settled.plan,
        memory=memory_table(settled.persona, settled.hardware, settled.plan),
        measured=tuple(runner.measured) if runner else (),
        startup=tuple(runner.startup.parts) if runner else (),
        sampling_defaults=sampling_defaults(settled),
    )


def uncovered_decode(plan: Plan) -> str:
    """What to warn of when decode steps can hold more rows than any decode graph; else empty.

    Only sizes that were asked for can be too small, and which path a large batch took would show
    in its speed alone (as users of other engines found out with a profiler).
    """
    sizes, most = plan.decode_graph.value, plan.max_running_requests.value
    if isinstance(sizes, str) or max(sizes) >= most:
        return ""
    return (
        f"Decode steps of more than {max(sizes)} sequences run without a graph: decode_graph has "
        f"no larger size, and {most} sequences may run (max_running_requests)"
    )


def sampling_defaults(settled: Settled) -> Decision[dict[str, Any]]:
    """Options of a request that brings no `SamplingParams`, where they are not our own defaults."""
    given = default_params(settled.checkpoint.generation_config)
    ours = SamplingParams()
    changed = {
        entry.name: getattr(given, entry.name)
        for entry in fields(given)
        if getattr(given, entry.name) != getattr(ours, entry.name)
    }
    reason = "the checkpoint's generation config" if changed else "the checkpoint states none"
    return Decision(
        name="sampling_defaults",
        value=changed,
        reason=f"{reason}; used where a request brings no SamplingParams",
        refused=tuple(
            Refusal(
                subject=name, reason="generation_config.json asks for it, and nothing here does"
            )
            for name in unheeded_defaults(settled.checkpoint.generation_config)
        ),
    )
