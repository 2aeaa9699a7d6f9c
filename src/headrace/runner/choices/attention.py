"""Page size and attention backends: each has a say in the other."""

from collections.abc import Iterator
from dataclasses import replace

from headrace.attention.capabilities import AttentionNeed, Phase
from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.attention.selection import select_attention
from headrace.base.decision import Decision, Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.engine_config import PAGE_SIZES, EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits


def choose_page_size(config: EngineConfig, hardware: Hardware) -> Decision[int]:
    """Of `auto`: the platform's size, or where backends asked by name refuse it, the nearest."""
    name = "page_size"
    if config.page_size is not None:
        return Decision(name=name, value=config.page_size, reason="tokens a page", asked=True)
    value, reason = 64, "a GPU reads pages of 64 tokens at full bandwidth"
    if hardware.platform == "cpu":
        value, reason = 16, "small pages waste less and share shorter prefixes"
    named = _named_backends(config)
    fitting = [size for size in PAGE_SIZES if all(_takes_pages(each, size) for each in named)]
    if value in fitting or not fitting:  # if none fits, the choice of backends says why
        return Decision(name=name, value=value, reason=reason)
    nearest = min(fitting, key=lambda size: max(size / value, value / size))
    refusal = Refusal(subject=str(value), reason=f"not a page size of {' and '.join(named)}")
    reason = f"the nearest to {value} that {' and '.join(named)} takes"
    return Decision(name=name, value=nearest, reason=reason, refused=(refusal,))


def _named_backends(config: EngineConfig) -> list[str]:
    """Registered attention backends that were asked for; an unknown name is told elsewhere."""
    asked = (
        config.attention_backend,
        config.prefill_attention_backend,
        config.decode_attention_backend,
    )
    return [name for name in dict.fromkeys(asked) if name and name in ATTENTION_BACKENDS]


def _takes_pages(backend: str, size: int) -> bool:
    takes = [entry.capabilities.page_sizes for entry in ATTENTION_BACKENDS.entries(backend)]
    return any(sizes is None or size in sizes for sizes in takes)


def choose_attention(
    config: EngineConfig,
    traits: ModelTraits,
    hardware: Hardware,
    *,
    page_size: int,
    dtype: str,
) -> tuple[Decision[str], Decision[str]]:
    """Backends of prefill and decode, each admitted for every KV group of the model.

    Raises:
        UnsupportedError: none serves; tells of both phases where both fail.
    """
    found, failed = [], []
    for phase in (Phase.PREFILL, Phase.DECODE):
        try:
            found.append(
                _attention_of(phase, config, traits, hardware, page_size=page_size, dtype=dtype)
            )
        except UnsupportedError as error:
            failed.append(error)
    if failed:
        whats, whys, remedies = (
            "; ".join(dict.fromkeys(getattr(error, part) for error in failed))
            for part in ("what", "why", "remedy")
        )
        raise UnsupportedError(whats, why=whys, remedy=remedies)
    prefill, decode = found
    if config.deterministic and prefill.value != decode.value:
        raise UnsupportedError(
            f"deterministic cannot be honoured with {prefill.value} in prefill and {decode.value} "
            "in decode",
            why="a row that decodes beside a prompt goes through the backend of prefill",
            remedy="Ask for one attention_backend",
        )
    return prefill, decode


def _attention_of(
    phase: Phase,
    config: EngineConfig,
    traits: ModelTraits,
    hardware: Hardware,
    *,
    page_size: int,
    dtype: str,
) -> Decision[str]:
    asked = getattr(config, f"{phase}_attention_backend") or config.attention_backend
    decisions = [
        select_attention(
            phase,
            asked,
            AttentionNeed.of(
                phase,
                group,
                traits.attention,
                dtype=dtype,
                kv_dtype=dtype,
                page_size=page_size,
                deterministic=config.deterministic,
            ),
            hardware,
        )
        for group in traits.kv_groups
    ]
    chosen = {decision.value for decision in decisions}
    if len(chosen) > 1:
        raise UnsupportedError(
            f"The KV groups of the model would take different backends: {', '.join(chosen)}",
            why="one backend serves all groups of a phase in this version",
            remedy="Ask for one with attention_backend to see why it does not serve all groups",
        )
    return replace(decisions[0], name=f"{phase}_attention")


def attention_conflicts(config: EngineConfig) -> Iterator[str]:
    both = config.attention_backend
    for phase in ("prefill", "decode"):
        name = f"{phase}_attention_backend"
        one = getattr(config, name)
        if None not in (both, one) and both != one:
            yield f"attention_backend {both} names both phases, {name} says {one} (ask one of them)"
