"""How much memory KV may take, and whether window layers have a pool of their own."""

from headrace.base.decision import Decision, Refusal
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits
from headrace.runner.memory_sizes import window_pool_saving

FRACTION_CPU, FRACTION_GPU = 0.25, 0.9


def choose_mem_fraction(config: EngineConfig, hardware: Hardware) -> Decision[float]:
    name = "mem_fraction"
    on_cpu = hardware.platform == "cpu"
    meaning = (
        "share of the memory available after loading that KV and buffers may take"
        if on_cpu
        else "share of the device that the engine may take"
    )
    if config.mem_fraction is not None:
        return Decision(name=name, value=config.mem_fraction, reason=meaning, asked=True)
    value = FRACTION_CPU if on_cpu else FRACTION_GPU
    rest = "others live in the rest" if on_cpu else "the rest is for libraries and fragmentation"
    return Decision(name=name, value=value, reason=f"{meaning}; {rest}")


def choose_max_total_tokens(config: EngineConfig, hardware: Hardware) -> Decision[int | None]:
    name, asked = "max_total_tokens", config.max_total_tokens
    if asked is not None:
        return Decision(name=name, value=asked, reason="rounded up to whole pages", asked=True)
    reason = "as many as fit, decided at start"
    if hardware.platform == "cpu":
        reason = "as many as running sequences can use, if they fit; decided at start"
    return Decision(name=name, value=None, reason=reason)


def choose_window_pool(traits: ModelTraits, kv_dtype: str, length: int) -> Decision[str]:
    """Whether window layers get pages of their own: not yet, and what that costs."""
    windows = [group for group in traits.kv_groups if group.window is not None]
    if not windows:
        return Decision(name="window_pool", value="shared", reason="no window layers")
    layers = sum(len(group.layers) for group in windows)
    saved = window_pool_saving(traits, kv_dtype, length)
    own = Refusal(
        subject="own", reason="window layers share the pages of the other layers in this version"
    )
    return Decision(
        name="window_pool",
        value="shared",
        reason=f"{layers} window layers keep all tokens; a pool of their own would save "
        f"{saved / 2**20:,.1f} MiB for every sequence of {length:,} tokens",
        refused=(own,),
    )
