"""The plan: one pure function of asked x persona x hardware x facts of the checkpoint.

Same input, same plan. Nothing here touches a device or a file; what only measuring can tell is
decided later by the runner. Asks that this version cannot serve are refused together, with every
reason, so that nobody has to start three times to learn of three conflicts.
"""

from collections.abc import Iterator

from headrace.base.decision import Decision
from headrace.base.errors import ConfigError, UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits, Persona
from headrace.config.plan import Plan
from headrace.runner.checkpoint_facts import CheckpointFacts
from headrace.runner.choices.attention import (
    attention_conflicts,
    choose_attention,
    choose_page_size,
)
from headrace.runner.choices.cpu_graph import choose_cpu_graph
from headrace.runner.choices.decode_graph import capture_conflicts, choose_decode_graph
from headrace.runner.choices.deterministic import choose_deterministic, deterministic_conflicts
from headrace.runner.choices.device import choose_device, device_conflicts
from headrace.runner.choices.dtype import choose_dtype, choose_kv_cache_dtype, dtype_conflicts
from headrace.runner.choices.experts import (
    choose_expert_distribution,
    choose_routed_experts,
    expert_conflicts,
)
from headrace.runner.choices.hidden_states import (
    choose_hidden_state_layers,
    hidden_state_conflicts,
)
from headrace.runner.choices.kv_canary import (
    choose_kv_canary,
    choose_real_data,
    choose_sweep_interval,
    kv_canary_conflicts,
)
from headrace.runner.choices.length import choose_max_model_len, choose_ropes, length_conflicts
from headrace.runner.choices.load_format import choose_load_format, load_format_conflicts
from headrace.runner.choices.memory import (
    choose_max_total_tokens,
    choose_mem_fraction,
    choose_window_pool,
)
from headrace.runner.choices.numeric_canary import choose_numeric_canary, numeric_canary_conflicts
from headrace.runner.choices.prefill_graph import choose_prefill_graph
from headrace.runner.choices.scheduling import (
    choose_chunked_prefill_size,
    choose_max_running_requests,
    choose_overlap,
    choose_prefix_cache,
    choose_split_prefill_layers,
    split_prefill_conflicts,
)
from headrace.runner.cpu_graph_gains import CpuGraphGain


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
    dtype = choose_dtype(config, traits, hardware, checkpoint)
    kv_cache_dtype = choose_kv_cache_dtype(config, dtype.value)
    length = choose_max_model_len(config, traits, hardware)
    page_size = choose_page_size(config, hardware)
    running = choose_max_running_requests(config, hardware)
    problems = list(_conflicts(config, traits, hardware, checkpoint, dtype.value))
    prefill, decode = _attention(config, traits, hardware, page_size.value, dtype.value, problems)
    return Plan(
        device=choose_device(config, hardware),
        load_format=choose_load_format(config, checkpoint),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=length,
        ropes=choose_ropes(traits, length.value),
        page_size=page_size,
        deterministic=choose_deterministic(config, hardware),
        prefill_attention=prefill,
        decode_attention=decode,
        decode_graph=choose_decode_graph(
            config, hardware, backend=decode.value, most=running.value
        ),
        hidden_state_layers=choose_hidden_state_layers(config, traits),
        prefill_graph=choose_prefill_graph(config, hardware, traits),
        cpu_graph=choose_cpu_graph(config, traits, hardware, dtype.value, gains),
        routed_experts=choose_routed_experts(config),
        expert_distribution=choose_expert_distribution(config),
        prefix_cache=choose_prefix_cache(config),
        overlap=choose_overlap(config, hardware),
        chunked_prefill_size=choose_chunked_prefill_size(config, hardware),
        split_prefill_layers=choose_split_prefill_layers(config, traits),
        max_running_requests=running,
        mem_fraction=choose_mem_fraction(config, hardware),
        max_total_tokens=choose_max_total_tokens(config, hardware),
        window_pool=choose_window_pool(traits, kv_cache_dtype.value, length.value),
        kv_canary=choose_kv_canary(config),
        kv_canary_real_data=choose_real_data(config),
        kv_canary_sweep_interval=choose_sweep_interval(config),
        numeric_canary=choose_numeric_canary(config),
    )


def _attention(
    config: EngineConfig,
    traits: ModelTraits,
    hardware: Hardware,
    page_size: int,
    dtype: str,
    problems: list[str],
) -> tuple[Decision[str], Decision[str]]:
    """Backends of prefill and decode, if nothing else stands in the way of a plan."""
    try:
        backends = choose_attention(config, traits, hardware, page_size=page_size, dtype=dtype)
    except UnsupportedError as error:
        if not problems:
            raise
        problems.append(str(error))  # one more reason, shown with the others
    if not problems:
        return backends
    what = "An option asked for cannot be honoured"
    if len(problems) > 1:
        what = f"{len(problems)} of the options asked for cannot be honoured"
    raise ConfigError(what, why="; ".join(problems))


def _conflicts(
    config: EngineConfig,
    traits: ModelTraits,
    hardware: Hardware,
    checkpoint: CheckpointFacts,
    dtype: str,
) -> Iterator[str]:
    """Why asks cannot be honoured, each with its remedy."""
    yield from device_conflicts(config, hardware)
    yield from load_format_conflicts(config, checkpoint)
    yield from dtype_conflicts(config, traits, hardware, dtype)
    yield from length_conflicts(config, traits)
    yield from attention_conflicts(config)
    yield from capture_conflicts(config, hardware)
    yield from deterministic_conflicts(config, traits, hardware)
    yield from split_prefill_conflicts(config, traits)
    yield from hidden_state_conflicts(config, traits, hardware)
    yield from expert_conflicts(config, traits)
    yield from kv_canary_conflicts(config, hardware)
    yield from numeric_canary_conflicts(config, traits, dtype)
