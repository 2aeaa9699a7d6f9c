"""The observers and taps of a runner, as its plan has them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from headrace.batch.rows import Allocate, Rows
from headrace.config.engine_config import EngineConfig
from headrace.config.plan import OFF, Plan
from headrace.models.decoder import CausalDecoder
from headrace.observers.expert_distribution import ExpertCounter, ExpertDistribution
from headrace.observers.kv_canary import KvCanary
from headrace.observers.routing import RoutedExperts, RoutingBuffer
from headrace.observers.step_observer import Observers, StepObserver
from headrace.observers.tap import NO_TAPS, ForwardTap, Taps
from headrace.runner.memory_sizes import canary_tokens, keeps_routing, routing_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWatch:
    """What looks at the choice of experts; `counter` is there where distributions may be asked."""

    buffer: RoutingBuffer
    counter: ExpertCounter | None


def watch_experts(plan: Plan, model: CausalDecoder, allocate: Allocate) -> ExpertWatch | None:
    """Have the layers write down their choice, if the plan has it; before paths are made."""
    if not keeps_routing(plan):
        return None
    moe, layers = model.traits.moe, model.moe_layers()
    assert moe is not None, "the plan refuses to keep the choice of experts that are not there"
    tokens, count = routing_tokens(plan), len(layers)
    buffer = RoutingBuffer(tokens, count, moe.num_experts_per_tok, allocate)
    for layer in layers:
        layer.tap = buffer.write
    counter = None
    if plan.expert_distribution.value != OFF:
        counter = ExpertCounter(buffer, count, moe.num_experts, allocate)
    return ExpertWatch(buffer=buffer, counter=counter)


def build_taps(experts: ExpertWatch | None, kv_canary: KvCanary | None) -> Taps:
    """Device work around every forward."""
    taps: list[ForwardTap] = [] if kv_canary is None else [kv_canary]
    if experts is not None and experts.counter is not None:
        taps.append(experts.counter)
    return Taps(taps) if taps else NO_TAPS


def build_observers(
    config: EngineConfig,
    plan: Plan,
    model: CausalDecoder,
    *,
    rows: Rows,
    tables: Mapping[str, Tensor],
    experts: ExpertWatch | None,
    kv_canary: KvCanary | None,
) -> Observers:
    """Contexts of the host around every forward.

    Args:
        model: its layers are bound. rows: the columns. tables: page table of each KV group.
    """
    members: list[StepObserver] = [] if kv_canary is None else [kv_canary]
    if plan.numeric_canary.value:
        # imported where asked for: without observers a runner has none of their code
        from headrace.observers.numeric_canary import NumericCanary
        from headrace.observers.tolerances import TOLERANCES
        from headrace.runner.step_reading import ReferenceStep, StepReader

        reader = StepReader(rows, tables, plan.page_size.value, model.attention_layers())
        tolerance = TOLERANCES[plan.dtype.value]
        members.append(
            NumericCanary(
                every=plan.numeric_canary.value,
                raises=config.numeric_canary_mode == "raise",
                reference=ReferenceStep(reader, model, plan, rounding=tolerance.rounding).run,
                read=reader.keys_values,
                tolerance=tolerance,
                backends=(plan.prefill_attention.value, plan.decode_attention.value),
                most_tokens=canary_tokens(plan),
            )
        )
    if experts is not None:
        members += _expert_observers(plan, model, experts)
    return Observers(members)


def _expert_observers(
    plan: Plan, model: CausalDecoder, experts: ExpertWatch
) -> Iterator[StepObserver]:
    if plan.routed_experts.value:
        yield RoutedExperts(experts.buffer)
    if experts.counter is not None:
        mode, layers = plan.expert_distribution.value, model.traits.moe_layers
        yield ExpertDistribution(experts.counter, experts.buffer, mode, layers)
