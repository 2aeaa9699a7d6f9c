"""Which inner layers' hidden states decode graphs keep."""

from collections.abc import Iterator

from headrace.base.decision import Decision
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits
from headrace.config.plan import OFF


def choose_hidden_state_layers(
    config: EngineConfig, traits: ModelTraits
) -> Decision[tuple[int, ...]]:
    """Ascending, 0 the embedding; without the state after the last norm, which is there anyway."""
    all_asked = {layer % (traits.num_layers + 1) for layer in config.hidden_state_layers}
    kept = tuple(sorted(all_asked - {traits.num_layers}))
    asked = bool(config.hidden_state_layers)
    reason = "the state after the last norm is there anyway; steps that need others run eagerly"
    if kept:
        reason = "decode graphs keep their states, and that after the last norm"
    return Decision(name="hidden_state_layers", value=kept, reason=reason, asked=asked)


def hidden_state_conflicts(
    config: EngineConfig, traits: ModelTraits, hardware: Hardware
) -> Iterator[str]:
    """Why the layers asked for cannot be kept."""
    asked, last = config.hidden_state_layers, traits.num_layers
    if not all(-last - 1 <= layer <= last for layer in asked):
        yield (
            f"hidden_state_layers {','.join(map(str, asked))} was asked, the model has {last} "
            f"layers (name layers from {-last - 1} to {last})"
        )
    if asked and (config.decode_graph == OFF or hardware.platform != "cuda"):
        off = config.decode_graph == OFF
        why = "they are off" if off else f"the device is a {hardware.platform}"
        yield (
            f"hidden_state_layers is about decode graphs, and {why} (leave it out: eager steps "
            "return any layer)"
        )
