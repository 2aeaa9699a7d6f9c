"""The plan: one pure function of asked x persona x hardware x facts of the checkpoint.

Same input, same plan. Nothing here touches a device or a file; what only measuring can tell is
decided later by the runner. Asks that this version cannot serve are refused together, with every
reason, so that nobody has to start three times to learn of three conflicts.
"""

from collections.abc import Iterator

from headrace.base.errors import ConfigError, UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits, Persona
from headrace.config.plan import Plan
from headrace.runner import attention_choice, choices
from headrace.runner.choices import CheckpointFacts
from headrace.runner.cpu_graph_choice import CpuGraphGain, choose_cpu_graph
from headrace.runner.deterministic_choice import choose_deterministic, deterministic_conflicts
from headrace.runner.expert_choice import (
    choose_expert_distribution,
    choose_routed_experts,
    expert_conflicts,
)
from headrace.runner.hidden_state_choice import (
    choose_hidden_state_layers,
    hidden_state_conflicts,
)
from headrace.runner.kv_canary_choice import (
    choose_kv_canary,
    choose_real_data,
    choose_sweep_interval,
    kv_canary_conflicts,
)
from headrace.runner.prefill_graph_choice import choose_prefill_graph

__all__ = ["CheckpointFacts", "resolve"]


def resolve(
    config: EngineConfig,
    persona: Persona,
    hardware: Hardware,
    *,
    checkpoint: CheckpointFacts,
    gains: tuple[CpuGraphGain, ...] = (),
) -> Plan:
    """Settle every choice.

    Args:
        gains: what compiled decode steps were measured to gain on this CPU.

    Raises:
        UnsupportedError: something was asked for by name that cannot be here.
        ConfigError: explicit asks contradict each other, the model or the hardware.
    """
    traits = persona.traits
    device = choices.device(config, hardware)
    dtype = choices.dtype(config, traits, hardware, checkpoint)
    kv_cache_dtype = choices.kv_cache_dtype(config, dtype.value)
    max_model_len = choices.max_model_len(config, traits, hardware)
    page_size = attention_choice.page_size(config, hardware)
    running = choices.max_running_requests(config, hardware)
    problems = list(_conflicts(config, traits, hardware, checkpoint, dtype.value))
    try:
        prefill, decode = attention_choice.attention(
            config, traits, hardware, page_size=page_size.value, dtype=dtype.value
        )
    except UnsupportedError as error:
        if not problems:
            raise
        problems.append(str(error))  # one more reason, shown with the others
    if problems:
        raise ConfigError(
            f"{len(problems)} of the options asked for cannot be honoured"
            if len(problems) > 1
            else "An option asked for cannot be honoured",
            why="; ".join(problems),
        )
    return Plan(
        device=device,
        load_format=choices.load_format(config, checkpoint),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        ropes=choices.ropes(traits, max_model_len.value),
        page_size=page_size,
        deterministic=choose_deterministic(config, hardware),
        prefill_attention=prefill,
        decode_attention=decode,
        decode_graph=choices.decode_graph(
            config, hardware, backend=decode.value, most=running.value
        ),
        hidden_state_layers=choose_hidden_state_layers(config, traits),
        prefill_graph=choose_prefill_graph(config, hardware, traits),
        cpu_graph=choose_cpu_graph(config, traits, hardware, dtype.value, gains),
        routed_experts=choose_routed_experts(config),
        expert_distribution=choose_expert_distribution(config),
        prefix_cache=choices.prefix_cache(config),
        overlap=choices.overlap(config, hardware),
        chunked_prefill_size=choices.chunked_prefill_size(config, hardware),
        split_prefill_layers=choices.split_prefill_layers(config, traits),
        max_running_requests=running,
        mem_fraction=choices.mem_fraction(config, hardware),
        max_total_tokens=choices.max_total_tokens(config, hardware),
        window_pool=choices.window_pool(traits, kv_cache_dtype.value, max_model_len.value),
        kv_canary=choose_kv_canary(config),
        kv_canary_real_data=choose_real_data(config),
        kv_canary_sweep_interval=choose_sweep_interval(config),
        numeric_canary=choices.numeric_canary(config),
    )


def _conflicts(
    config: EngineConfig,
    traits: ModelTraits,
    hardware: Hardware,
    checkpoint: CheckpointFacts,
    dtype: str,
) -> Iterator[str]:
    """Why asks cannot be honoured, each with its remedy."""
    yield from _device_conflicts(config, hardware)
    yield from _capture_conflicts(config, hardware)
    yield from hidden_state_conflicts(config, traits, hardware)
    yield from kv_canary_conflicts(config, hardware)
    yield from _dtype_conflicts(config, traits, hardware, dtype)
    yield from _length_conflicts(config, traits)
    yield from _attention_conflicts(config)
    yield from deterministic_conflicts(config, traits, hardware)
    yield from expert_conflicts(config, traits)
    if config.numeric_canary_mode == "raise" and not config.numeric_canary:
        yield "numeric_canary_mode raise was asked, and numeric_canary is off (give it a number)"
    if (config.split_prefill_layers or 0) > traits.num_layers:
        yield (
            f"split_prefill_layers {config.split_prefill_layers} was asked, and the model has "
            f"{traits.num_layers} layers, so that no prompt would be split (ask for fewer)"
        )
    if config.numeric_canary and traits.moe is not None and dtype != "float32":
        yield (
            f"numeric_canary was asked of a mixture of experts in {dtype}, where rounding decides "
            "between experts that are nearly tied, so that right steps differ (use dtype float32, "
            "or kv_canary)"
        )
    stored = checkpoint.load_format
    if config.load_format not in ("auto", "dummy", stored):
        yield (
            f"load_format {config.load_format} was asked, the checkpoint is {stored} "
            "(leave load_format at auto)"
        )


def _capture_conflicts(config: EngineConfig, hardware: Hardware) -> Iterator[str]:
    off = config.decode_graph == config.prefill_graph == "off"
    if config.capture == "all" and (off or hardware.platform != "cuda"):
        why = "both graphs are off" if off else f"the device is a {hardware.platform}"
        yield f"capture all was asked and nothing is captured: {why} (use capture need)"


def _device_conflicts(config: EngineConfig, hardware: Hardware) -> Iterator[str]:
    if config.device not in ("auto", choices.torch_device(hardware)):
        origin = "assumed" if hardware.assumed else "detected"
        yield f"device {config.device} was asked, the {origin} hardware is {hardware.platform}"


def _dtype_conflicts(
    config: EngineConfig, traits: ModelTraits, hardware: Hardware, dtype: str
) -> Iterator[str]:
    if config.dtype == "bfloat16" and not choices.has_bfloat16(hardware):
        yield (
            f"dtype bfloat16 needs compute capability 8.0, {hardware.name} has "
            f"{choices.dotted(hardware.capability)} (use float16 or float32)"
        )
    if config.dtype == "float16" and choices.overflows_float16(traits):
        yield (
            f"dtype float16 ends at 65504 and activations of {traits.family} models exceed it "
            "(use bfloat16 or float32)"
        )
    if config.kv_cache_dtype not in ("auto", dtype):
        yield (
            f"kv_cache_dtype {config.kv_cache_dtype} differs from dtype {dtype}, and attention "
            f"reads the pool in the dtype it computes in (leave kv_cache_dtype at auto, or ask "
            f"for dtype {config.kv_cache_dtype})"
        )


def _length_conflicts(config: EngineConfig, traits: ModelTraits) -> Iterator[str]:
    longest, length = traits.max_position, config.max_model_len
    if length is not None and length > longest:
        yield (
            f"max_model_len {length:,} is beyond the {longest:,} positions the model is made for "
            f"(ask for at most {longest:,}, or state a rope scaling in the checkpoint's config)"
        )
    total = config.max_total_tokens
    if total is not None and length is not None and total < length:
        yield (
            f"max_total_tokens {total:,} cannot hold one sequence of max_model_len {length:,} "
            "(raise the one or lower the other)"
        )


def _attention_conflicts(config: EngineConfig) -> Iterator[str]:
    both = config.attention_backend
    for phase in ("prefill", "decode"):
        name = f"{phase}_attention_backend"
        one = getattr(config, name)
        if None not in (both, one) and both != one:
            yield f"attention_backend {both} names both phases, {name} says {one} (ask one of them)"
