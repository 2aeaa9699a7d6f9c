"""Every how many steps one is run again by reference."""

from collections.abc import Iterator

from headrace.base.decision import Decision
from headrace.config.engine_config import EngineConfig
from headrace.config.persona import ModelTraits


def choose_numeric_canary(config: EngineConfig) -> Decision[int]:
    """Every how many steps; 0: none."""
    name, every = "numeric_canary", config.numeric_canary
    if not every:
        return Decision(name=name, value=0, reason="no step is run twice")
    reason = f"every {every} steps one is run by reference too; then {config.numeric_canary_mode}"
    return Decision(name=name, value=every, reason=reason, asked=True)


def numeric_canary_conflicts(
    config: EngineConfig, traits: ModelTraits, dtype: str
) -> Iterator[str]:
    """Why the canary that was asked for cannot be."""
    if config.numeric_canary_mode == "raise" and not config.numeric_canary:
        yield "numeric_canary_mode raise was asked, and numeric_canary is off (give it a number)"
    if config.numeric_canary and traits.moe is not None and dtype != "float32":
        yield (
            f"numeric_canary was asked of a mixture of experts in {dtype}, where rounding decides "
            "between experts that are nearly tied, so that right steps differ (use dtype float32, "
            "or kv_canary)"
        )
