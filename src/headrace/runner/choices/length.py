"""How long a sequence may be, and what depends on that: the ropes."""

from collections.abc import Iterator

from headrace.base.decision import Decision, Refusal
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits
from headrace.config.plan import RopePlan

CPU_CONTEXT_CAP = 8192
LENGTH_ROPES = ("dynamic", "longrope")  # their frequencies change with the length they are used at


def choose_max_model_len(
    config: EngineConfig, traits: ModelTraits, hardware: Hardware
) -> Decision[int]:
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


def choose_ropes(traits: ModelTraits, length: int) -> Decision[dict[str, RopePlan]]:
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


def length_conflicts(config: EngineConfig, traits: ModelTraits) -> Iterator[str]:
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
