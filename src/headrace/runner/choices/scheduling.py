"""How much a step takes on, and how steps follow each other."""

from collections.abc import Iterator

from headrace.base.decision import Decision, Refusal
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits

# Tokens a step by device memory in MiB: bigger devices hold larger activations and need larger
# products to be busy. The steps are those SGLang arrived at for its own defaults (0.5.15).
CHUNK_TABLE = ((35_000, 2048), (60_000, 4096), (160_000, 8192))
CHUNK_LARGEST = 16384
CHUNK_CPU = 512
RUNNING_CPU, RUNNING_GPU = 64, 256


def choose_chunked_prefill_size(config: EngineConfig, hardware: Hardware) -> Decision[int]:
    name, asked = "chunked_prefill_size", config.chunked_prefill_size
    if asked is not None:
        return Decision(name=name, value=asked, reason="tokens a step", asked=True)
    if hardware.platform == "cpu":
        reason = "a longer step would stall running sequences"
        return Decision(name=name, value=CHUNK_CPU, reason=reason)
    mebibytes = hardware.memory_bytes / 2**20
    value = next((size for below, size in CHUNK_TABLE if mebibytes < below), CHUNK_LARGEST)
    return Decision(name=name, value=value, reason=f"for {mebibytes:,.0f} MiB of device memory")


def choose_max_running_requests(config: EngineConfig, hardware: Hardware) -> Decision[int]:
    name, asked = "max_running_requests", config.max_running_requests
    if asked is not None:
        return Decision(name=name, value=asked, reason="rows of the batch", asked=True)
    if hardware.platform == "cpu":
        reason = "more sequences only slow each other on a CPU"
        return Decision(name=name, value=RUNNING_CPU, reason=reason)
    reason = "where decode products turn from bytes to arithmetic"
    return Decision(name=name, value=RUNNING_GPU, reason=reason)


def choose_split_prefill_layers(config: EngineConfig, traits: ModelTraits) -> Decision[int]:
    """0: prompts run whole."""
    name, asked = "split_prefill_layers", config.split_prefill_layers
    if asked is None:
        return Decision(name=name, value=0, reason="prompt and decode tokens share their steps")
    pieces = -(-traits.num_layers // asked)
    reason = f"long prompts run in {pieces} parts while others decode"
    return Decision(name=name, value=asked, reason=reason, asked=True)


def split_prefill_conflicts(config: EngineConfig, traits: ModelTraits) -> Iterator[str]:
    """Why prompts would not be split."""
    if (config.split_prefill_layers or 0) > traits.num_layers:
        yield (
            f"split_prefill_layers {config.split_prefill_layers} was asked, and the model has "
            f"{traits.num_layers} layers, so that no prompt would be split (ask for fewer)"
        )


def choose_overlap(config: EngineConfig, hardware: Hardware) -> Decision[bool]:
    name, asked = "overlap", config.enable_overlap
    if asked is not None:
        reason = "a step is launched before the results of the one before are read"
        return Decision(name=name, value=asked, reason=reason, asked=True)
    if hardware.platform == "cpu":
        refusal = Refusal(
            subject="on",
            reason="host and model share the cores, so nothing would run at the same time",
            remedy="enable_overlap",
        )
        return Decision(name=name, value=False, reason="off on a CPU", refused=(refusal,))
    return Decision(name=name, value=True, reason="host work hides behind the device's step")


def choose_prefix_cache(config: EngineConfig) -> Decision[bool]:
    reason = "KV of finished prompts serves later ones with the same beginning"
    if not config.enable_prefix_cache:
        reason = "asked to be off"
    return Decision(
        name="prefix_cache",
        value=config.enable_prefix_cache,
        reason=reason,
        asked=not config.enable_prefix_cache,  # on is the default, so only off is known to be asked
    )
