"""One function per decision of the plan: its value, its reason, what was refused.

All pure. `resolve` calls them in order, after it made sure that nothing asked contradicts itself.
"""

from dataclasses import dataclass

from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.base.decision import Decision, Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import GIB, Hardware
from headrace.config.persona import ModelTraits
from headrace.config.plan import RopePlan
from headrace.runner.memory_table import weight_bytes, window_pool_saving

CPU_CONTEXT_CAP = 8192
CPU_WEIGHT_SHARE = 0.5
# Tokens a step by device memory in MiB: bigger devices hold larger activations and need larger
# products to be busy. The steps are those SGLang arrived at for its own defaults (0.5.15).
CHUNK_TABLE = ((35_000, 2048), (60_000, 4096), (160_000, 8192))
CHUNK_LARGEST = 16384
CHUNK_CPU = 512
RUNNING_CPU, RUNNING_GPU = 64, 256
FRACTION_CPU, FRACTION_GPU = 0.25, 0.9
# Ropes whose frequencies change with the length they are used at.
LENGTH_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What the plan needs to know of the files.

    Attributes:
        load_format: safetensors or gguf.
        dtype: of most of the stored bytes; "packed" for quantised blocks, which carry no compute
            dtype; `None` where there are no weights and the config's word counts.
    """

    load_format: str = "safetensors"
    dtype: str | None = None


def torch_device(hardware: Hardware) -> str:
    """The name torch gives the device: ROCm presents itself as cuda."""
    return "cuda" if hardware.platform == "rocm" else hardware.platform


def device(config: EngineConfig, hardware: Hardware) -> Decision[str]:
    asked, value = config.device != "auto", torch_device(hardware)
    refused: tuple[Refusal, ...] = ()
    if hardware.assumed:
        reason = f"hardware assumed: {hardware.name}"
    elif value == "cpu" and not asked:
        reason = "no usable CUDA device"
        refused = (
            Refusal(
                subject="cuda",
                reason="torch finds no device that it can use",
                remedy="a CUDA build of torch and a working driver",
            ),
        )
    else:
        reason = hardware.name
    return Decision(name="device", value=value, reason=reason, asked=asked, refused=refused)


def load_format(config: EngineConfig, checkpoint: CheckpointFacts) -> Decision[str]:
    if config.load_format == "dummy":
        return Decision(
            name="load_format", value="dummy", reason=f"random, seed {config.seed}", asked=True
        )
    return Decision(
        name="load_format",
        value=checkpoint.load_format,
        reason="the checkpoint's format",
        asked=config.load_format != "auto",
    )


def dtype(
    config: EngineConfig, traits: ModelTraits, hardware: Hardware, checkpoint: CheckpointFacts
) -> Decision[str]:
    stored = checkpoint.dtype or traits.dtype
    if config.dtype != "auto":
        reason = f"the checkpoint holds {stored} weights"
        return Decision(name="dtype", value=config.dtype, reason=reason, asked=True)
    if hardware.platform == "cpu":
        return _cpu_dtype(traits, hardware)
    if not has_bfloat16(hardware):
        return _dtype_without_bfloat16(traits, hardware)
    if stored == "bfloat16" or (stored == "float16" and not overflows_float16(traits)):
        return Decision(name="dtype", value=stored, reason="the checkpoint's dtype")
    if stored == "packed":
        reason = "packed weights carry no compute dtype; bfloat16 keeps float32's range"
        return Decision(name="dtype", value="bfloat16", reason=reason)
    refusal = Refusal(
        subject="float32",
        reason="twice the bytes and no matrix units for them",
        remedy="dtype float32, to be exact",
    )
    if stored == "float16":
        refusal = Refusal(subject="float16", reason=_overflow(traits))
    return Decision(
        name="dtype",
        value="bfloat16",
        reason=f"{stored} weights; bfloat16 keeps float32's range at half the bytes",
        refused=(refusal,),
    )


def _dtype_without_bfloat16(traits: ModelTraits, hardware: Hardware) -> Decision[str]:
    refused = [
        Refusal(
            subject="bfloat16",
            reason=f"needs compute capability 8.0, this is {dotted(hardware.capability)}",
        )
    ]
    value, reason = "float16", "half the bytes of float32"
    if overflows_float16(traits):
        value, reason = "float32", "the one dtype here whose range and kernels suffice"
        refused.append(Refusal(subject="float16", reason=_overflow(traits)))
    return Decision(name="dtype", value=value, reason=reason, refused=tuple(refused))


def _cpu_dtype(traits: ModelTraits, hardware: Hardware) -> Decision[str]:
    needed = sum(weight_bytes(traits, "float32").values())
    allowed = int(hardware.memory_bytes * CPU_WEIGHT_SHARE)
    if needed > allowed:
        return Decision(
            name="dtype",
            value="bfloat16",
            reason="float32 weights would crowd out the rest of the machine",
            refused=(
                Refusal(
                    subject="float32",
                    reason=f"{needed / GIB:,.1f} GiB of weights, more than half of "
                    f"{hardware.memory_bytes / GIB:,.1f} GiB",
                    remedy="dtype float32",
                ),
            ),
        )
    return Decision(
        name="dtype",
        value="float32",
        reason="on a CPU float32 is exact, and one sequence runs as fast as in bfloat16",
        refused=(
            Refusal(
                subject="bfloat16",
                reason="29 to 26 ms a pass over SmolLM2-135M on 2 cores is not worth the error",
                remedy="dtype bfloat16, for batches on a CPU with bfloat16 matrix units",
            ),
        ),
    )


def kv_cache_dtype(config: EngineConfig, dtype: str) -> Decision[str]:
    asked = config.kv_cache_dtype != "auto"
    return Decision(name="kv_cache_dtype", value=dtype, reason="follows dtype", asked=asked)


def max_model_len(config: EngineConfig, traits: ModelTraits, hardware: Hardware) -> Decision[int]:
    name, longest = "max_model_len", traits.max_position
    made_for = f"the model is made for {longest:,} positions"
    if config.max_model_len is not None:
        return Decision(name=name, value=config.max_model_len, reason=made_for, asked=True)
    caps = [(longest, made_for)]
    if hardware.platform == "cpu":
        caps.append((CPU_CONTEXT_CAP, "a CPU prefills slowly and keeps its memory for others"))
    if config.max_total_tokens is not None:
        caps.append((config.max_total_tokens, "the whole pool, max_total_tokens"))
    value, cap = min(caps, key=lambda entry: entry[0])
    refused: tuple[Refusal, ...] = ()
    if value < longest:
        remedy = f"ask for max_model_len up to {longest:,}"
        refused = (Refusal(subject=f"{longest:,}", reason=cap, remedy=remedy),)
    return Decision(name=name, value=value, reason=made_for, refused=refused)


def ropes(traits: ModelTraits, length: int) -> Decision[dict[str, RopePlan]]:
    ropes = {name: RopePlan(traits=rope, length=length) for name, rope in traits.ropes.items()}
    fixed = [
        f"{name} ({rope.kind})" for name, rope in traits.ropes.items() if rope.kind in LENGTH_ROPES
    ]
    reason = "no rule depends on the length"
    if fixed:
        reason = (
            f"{', '.join(fixed)} fixed for {length:,} tokens, so that a request gives the same "
            "answer at any length"
        )
    return Decision(name="ropes", value=ropes, reason=reason)


def decode_graph(
    config: EngineConfig, hardware: Hardware, *, backend: str, most: int
) -> Decision[str | tuple[int, ...]]:
    """Rows of the decode graphs, or off.

    Raises:
        UnsupportedError: sizes were asked and no graph can be captured, or they exceed the rows.
    """
    name, asked = "decode_graph", config.decode_graph
    if asked == "off":
        return Decision(name=name, value="off", reason="asked to be off", asked=True)
    refusal = _graph_refusal(hardware, backend)
    if isinstance(asked, tuple):
        if refusal is not None:
            raise UnsupportedError(
                f"decode_graph {list(asked)} cannot be captured",
                why=refusal.reason,
                remedy=refusal.remedy or "Use auto or off",
            )
        if max(asked) > most:
            raise UnsupportedError(
                f"decode_graph asks for {max(asked)} rows",
                why=f"at most {most} sequences run at a time (max_running_requests)",
                remedy="Lower the sizes or raise max_running_requests",
            )
        return Decision(name=name, value=tuple(sorted(set(asked))), reason="sizes", asked=True)
    if refusal is not None:
        reason = "eager takes every decode step"
        return Decision(name=name, value="off", reason=reason, refused=(refusal,))
    reason = "rows of the buckets: close together where few rows make padding dear"
    return Decision(name=name, value=decode_sizes(most), reason=reason)


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 32 beyond; `most` is the last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return (*(size for size in sizes if size < most), most)


def _graph_refusal(hardware: Hardware, backend: str) -> Refusal | None:
    if hardware.platform != "cuda":
        return Refusal(subject="decode_graph", reason="CUDA graphs need a CUDA device")
    if "triton" not in hardware.packages:
        return Refusal(
            subject="decode_graph",
            reason="preparation and sampling inside the graph are Triton kernels",
            remedy="pip install 'headrace[cuda]'",
        )
    if not any(entry.capabilities.graph_decode for entry in ATTENTION_BACKENDS.entries(backend)):
        return Refusal(
            subject="decode_graph",
            reason=f"attention backend {backend} cannot be captured",
            remedy="decode_attention_backend triton",
        )
    return None


def numeric_canary(config: EngineConfig) -> Decision[int]:
    """Every how many steps; 0: none."""
    name, every = "numeric_canary", config.numeric_canary
    if not every:
        return Decision(name=name, value=0, reason="no step is run twice")
    reason = f"every {every} steps one is run by reference too; then {config.numeric_canary_mode}"
    return Decision(name=name, value=every, reason=reason, asked=True)


def prefix_cache(config: EngineConfig) -> Decision[bool]:
    reason = "KV of finished prompts serves later ones with the same beginning"
    if not config.enable_prefix_cache:
        reason = "asked to be off"
    return Decision(
        name="prefix_cache",
        value=config.enable_prefix_cache,
        reason=reason,
        asked=not config.enable_prefix_cache,  # on is the default, so only off is known to be asked
    )


def overlap(config: EngineConfig, hardware: Hardware) -> Decision[bool]:
    name = "overlap"
    if config.enable_overlap is not None:
        return Decision(
            name=name,
            value=config.enable_overlap,
            reason="a step is launched before the results of the one before are read",
            asked=True,
        )
    if hardware.platform == "cpu":
        refusal = Refusal(
            subject="on",
            reason="host and model share the cores, so nothing would run at the same time",
            remedy="enable_overlap",
        )
        return Decision(name=name, value=False, reason="off on a CPU", refused=(refusal,))
    return Decision(name=name, value=True, reason="host work hides behind the device's step")


def chunked_prefill_size(config: EngineConfig, hardware: Hardware) -> Decision[int]:
    name = "chunked_prefill_size"
    if config.chunked_prefill_size is not None:
        return Decision(
            name=name, value=config.chunked_prefill_size, reason="tokens a step", asked=True
        )
    if hardware.platform == "cpu":
        return Decision(
            name=name, value=CHUNK_CPU, reason="a longer step would stall running sequences"
        )
    mebibytes = hardware.memory_bytes / 2**20
    value = next((size for below, size in CHUNK_TABLE if mebibytes < below), CHUNK_LARGEST)
    return Decision(name=name, value=value, reason=f"for {mebibytes:,.0f} MiB of device memory")


def split_prefill_layers(config: EngineConfig, traits: ModelTraits) -> Decision[int]:
    """0: prompts run whole."""
    name, asked = "split_prefill_layers", config.split_prefill_layers
    if asked is None:
        return Decision(name=name, value=0, reason="prompt and decode tokens share their steps")
    pieces = -(-traits.num_layers // asked)
    reason = f"long prompts run in {pieces} parts while others decode"
    return Decision(name=name, value=asked, reason=reason, asked=True)


def max_running_requests(config: EngineConfig, hardware: Hardware) -> Decision[int]:
    name = "max_running_requests"
    if config.max_running_requests is not None:
        return Decision(
            name=name, value=config.max_running_requests, reason="rows of the batch", asked=True
        )
    if hardware.platform == "cpu":
        return Decision(
            name=name, value=RUNNING_CPU, reason="more sequences only slow each other on a CPU"
        )
    return Decision(
        name=name, value=RUNNING_GPU, reason="where decode products turn from bytes to arithmetic"
    )


def mem_fraction(config: EngineConfig, hardware: Hardware) -> Decision[float]:
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


def max_total_tokens(config: EngineConfig, hardware: Hardware) -> Decision[int | None]:
    name = "max_total_tokens"
    if config.max_total_tokens is not None:
        return Decision(
            name=name,
            value=config.max_total_tokens,
            reason="rounded up to whole pages",
            asked=True,
        )
    reason = "as many as fit, decided at start"
    if hardware.platform == "cpu":
        reason = "as many as running sequences can use, if they fit; decided at start"
    return Decision(name=name, value=None, reason=reason)


def window_pool(traits: ModelTraits, kv_dtype: str, length: int) -> Decision[str]:
    """Whether window layers get pages of their own: not yet, and what that costs."""
    windows = [group for group in traits.kv_groups if group.window is not None]
    if not windows:
        return Decision(name="window_pool", value="shared", reason="no window layers")
    layers = sum(len(group.layers) for group in windows)
    saved = window_pool_saving(traits, kv_dtype, length)
    return Decision(
        name="window_pool",
        value="shared",
        reason=f"{layers} window layers keep all tokens; a pool of their own would save "
        f"{saved:,} bytes for every sequence of {length:,} tokens",
        refused=(
            Refusal(
                subject="own",
                reason="window layers share the pages of the other layers in this version",
            ),
        ),
    )


def has_bfloat16(hardware: Hardware) -> bool:
    return hardware.platform != "cuda" or hardware.capability >= (8, 0)


def overflows_float16(traits: ModelTraits) -> bool:
    """Gemma's activations pass 65504 (reported for Gemma 2 and 3 by every engine that ran them)."""
    return traits.family.startswith("gemma")


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _overflow(traits: ModelTraits) -> str:
    return f"it ends at 65504, and activations of {traits.family} models pass that"
