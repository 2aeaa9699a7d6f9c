"""Which device, by the name torch gives it."""

from collections.abc import Iterator

from headrace.base.decision import Decision, Refusal
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware


def torch_device(hardware: Hardware) -> str:
    """The name torch gives the device: ROCm presents itself as cuda."""
    return "cuda" if hardware.platform == "rocm" else hardware.platform


def choose_device(config: EngineConfig, hardware: Hardware) -> Decision[str]:
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


def device_conflicts(config: EngineConfig, hardware: Hardware) -> Iterator[str]:
    if config.device not in ("auto", torch_device(hardware)):
        origin = "assumed" if hardware.assumed else "detected"
        yield f"device {config.device} was asked, the {origin} hardware is {hardware.platform}"
