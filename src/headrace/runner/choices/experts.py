"""Whether the choice of experts leaves the forward: for requests, and for statistics."""

from collections.abc import Iterator

from headrace.base.decision import Decision
from headrace.config.engine_config import EngineConfig
from headrace.config.persona import ModelTraits
from headrace.config.plan import OFF


def choose_routed_experts(config: EngineConfig) -> Decision[bool]:
    name, asked = "routed_experts", config.enable_return_routed_experts
    reason = "no request may ask for them; nothing is kept"
    if asked:
        reason = "every path keeps them; those of requests that ask go to the host"
    return Decision(name=name, value=asked, reason=reason, asked=asked)


def choose_expert_distribution(config: EngineConfig) -> Decision[str]:
    """The mode of recordings that name none, or off."""
    name, mode = "expert_distribution", config.expert_distribution_recorder_mode
    if mode == OFF:
        return Decision(name=name, value=OFF, reason="nothing is counted")
    reason = "every path counts; recordings begin when they are started"
    return Decision(name=name, value=mode, reason=reason, asked=True)


def expert_conflicts(config: EngineConfig, traits: ModelTraits) -> Iterator[str]:
    """Why the choice of experts cannot leave this model's forward."""
    for name, asked in (
        ("enable_return_routed_experts", config.enable_return_routed_experts),
        ("expert_distribution_recorder_mode", config.expert_distribution_recorder_mode != OFF),
    ):
        if not asked:
            continue
        if not traits.moe_layers:
            yield f"{name} was asked, and this {traits.family} has no experts (leave it out)"
        elif config.split_prefill_layers is not None:
            yield (
                f"{name} was asked together with split_prefill_layers, and other steps would write "
                "between the parts of a prompt's (ask for one of them)"
            )
