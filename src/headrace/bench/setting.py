"""Where a benchmark ran: model, device, dtype, threads; and the engines it compares."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.base.errors import ConfigError
from headrace.bench.ceilings import Ceilings, measure_ceilings
from headrace.bench.contestants import Contestant, Headrace, TransformersPeer
from headrace.bench.shapes import shown_name
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.opening import open_checkpoint
from headrace.config.engine_config import DTYPES, EngineConfig
from headrace.runner.assembly import settle
from headrace.runner.choices.device import torch_device
from headrace.runner.detect import detect
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The circumstances every number is quoted with."""

    model: str
    device: str
    hardware: str
    dtype: str
    threads: int
    repeats: int
    vocab_size: int
    headrace: str = __version__
    torch: str = torch.__version__

    @classmethod
    def of(cls, llm: "LLM", *, threads: int, repeats: int) -> "Setting":
        explanation = llm.explain()
        return cls(
            model=shown_name(llm.config.model),
            device=explanation.plan.device.value,
            hardware=explanation.hardware.name,
            dtype=explanation.plan.dtype.value,
            threads=threads,
            repeats=repeats,
            vocab_size=explanation.persona.traits.vocab_size,
        )

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.dtype}, {self.device} ({self.hardware}), {self.threads} threads, "
            f"medians of {self.repeats}, torch {self.torch}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def use_threads(count: int | None) -> int:
    """Let torch use `count` threads (its own choice if `None`), for every engine alike."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()


def ceilings_of(config: EngineConfig) -> Ceilings:
    """The ceilings of the device and dtype that the plan would choose; call it before loading."""
    plan = settle(config).plan
    return measure_ceilings(torch.device(plan.device.value), getattr(torch, plan.dtype.value))


def device_ceilings(device: str, dtype: str) -> Ceilings:
    """The ceilings of a device by its name in `EngineConfig`.

    Raises:
        ConfigError: the dtype is unknown. UnsupportedError: there is no such device.
    """
    if dtype not in DTYPES[1:]:
        raise ConfigError(f"dtype is {dtype!r}", remedy=f"Use one of: {', '.join(DTYPES[1:])}")
    return measure_ceilings(torch.device(torch_device(detect(device))), getattr(torch, dtype))


def engines_of(llm: "LLM", against: str | None) -> list[Contestant]:
    """Our engine, and the peer that was asked for, on the same device in the same dtype."""
    ours = Headrace(llm)
    if against is None:
        return [ours]
    plan = llm.explain().plan
    checkpoint = open_checkpoint(resolve_model(llm.config.model, llm.config.revision))
    dtype: torch.dtype = getattr(torch, plan.dtype.value)
    return [
        ours,
        TransformersPeer(checkpoint, dtype=dtype, device=torch.device(plan.device.value)),
    ]
