"""Deterministic mode: results bit for bit the same in any batch. What it takes, what it refuses."""

from collections.abc import Iterator

from headrace.base.decision import Decision, Refusal
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits

NAME = "deterministic"
COMPILED = "torch.compile orders sums by the sizes of a step"


def choose_deterministic(config: EngineConfig, hardware: Hardware) -> Decision[bool]:
    """Whether a request has the same bits alone or in any batch, chunked or not, cached or not."""
    if not config.deterministic:
        return Decision(name=NAME, value=False, reason="results are the same up to rounding")
    way = (
        "products by blocks of rows of proven sizes, attention by blocks of keys at fixed places"
        if hardware.platform == "cpu"
        else "products and attention by kernels with one order of sums"
    )
    return Decision(name=NAME, value=True, reason=way, asked=True)


def deterministic_conflicts(
    config: EngineConfig, traits: ModelTraits, hardware: Hardware
) -> Iterator[str]:
    """What stands in the way of deterministic mode, each with its remedy."""
    if not config.deterministic:
        return
    if hardware.platform not in ("cpu", "cuda"):
        yield f"deterministic has no kernels for {hardware.platform} (leave it off)"
    if hardware.platform == "cuda" and "triton" not in hardware.packages:
        yield "deterministic needs Triton on a GPU (pip install 'headrace[cuda]')"
    if traits.moe_layers:
        yield (
            "deterministic cannot be honoured for a mixture of experts: the product of an expert "
            "is made of its rows alone, whose number changes with the batch (leave it off)"
        )


def deterministic_refusal(config: EngineConfig, subject: str) -> Refusal | None:
    """Why a compiled path is not there; `None` where results need not be deterministic."""
    if not config.deterministic:
        return None
    return Refusal(subject=subject, reason=COMPILED, remedy="leave deterministic off")
