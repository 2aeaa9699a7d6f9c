"""The dtype of weights and products, and that of the KV pool."""

from collections.abc import Iterator

from headrace.base.decision import Decision, Refusal
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import GIB, Hardware
from headrace.config.persona import ModelTraits
from headrace.runner.checkpoint_facts import CheckpointFacts
from headrace.runner.memory_sizes import weight_bytes

CPU_WEIGHT_SHARE = 0.5  # of the machine's memory, above which float32 weights are too many


def choose_dtype(
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
        too_large = Refusal(
            subject="float32",
            reason=f"{needed / GIB:,.1f} GiB of weights, more than half of "
            f"{hardware.memory_bytes / GIB:,.1f} GiB",
            remedy="dtype float32",
        )
        reason = "float32 weights would crowd out the rest of the machine"
        return Decision(name="dtype", value="bfloat16", reason=reason, refused=(too_large,))
    coarser = Refusal(
        subject="bfloat16",
        reason="29 to 26 ms a pass over SmolLM2-135M on 2 cores is not worth the error",
        remedy="dtype bfloat16, for batches on a CPU with bfloat16 matrix units",
    )
    reason = "on a CPU float32 is exact, and one sequence runs as fast as in bfloat16"
    return Decision(name="dtype", value="float32", reason=reason, refused=(coarser,))


def choose_kv_cache_dtype(config: EngineConfig, dtype: str) -> Decision[str]:
    asked = config.kv_cache_dtype != "auto"
    return Decision(name="kv_cache_dtype", value=dtype, reason="follows dtype", asked=asked)


def dtype_conflicts(
    config: EngineConfig, traits: ModelTraits, hardware: Hardware, dtype: str
) -> Iterator[str]:
    if config.dtype == "bfloat16" and not has_bfloat16(hardware):
        yield (
            f"dtype bfloat16 needs compute capability 8.0, {hardware.name} has "
            f"{dotted(hardware.capability)} (use float16 or float32)"
        )
    if config.dtype == "float16" and overflows_float16(traits):
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


def has_bfloat16(hardware: Hardware) -> bool:
    return hardware.platform != "cuda" or hardware.capability >= (8, 0)


def overflows_float16(traits: ModelTraits) -> bool:
    """Gemma's activations pass 65504 (reported for Gemma 2 and 3 by every engine that ran them)."""
    return traits.family.startswith("gemma")


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _overflow(traits: ModelTraits) -> str:
    return f"it ends at 65504, and activations of {traits.family} models pass that"
