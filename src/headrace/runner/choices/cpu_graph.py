"""Whether decode steps on a CPU are compiled: off unless asked or measured to pay here."""

from headrace.base.decision import Decision, Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits
from headrace.config.plan import OFF
from headrace.runner.choices.deterministic import deterministic_refusal
from headrace.runner.cpu_graph_gains import MEASURE, CpuGraphGain, shape_of

NAME = "cpu_graph"
COMPILER = "g++"


def choose_cpu_graph(
    config: EngineConfig,
    traits: ModelTraits,
    hardware: Hardware,
    dtype: str,
    gains: tuple[CpuGraphGain, ...],
) -> Decision[str]:
    """On or off.

    Args:
        gains: measurements on this CPU with this torch and these threads.

    Raises:
        UnsupportedError: it was asked for and cannot be.
    """
    if config.cpu_graph == OFF:
        return Decision(name=NAME, value=OFF, reason="asked to be off", asked=True)
    refusal = _refusal(hardware, traits) or deterministic_refusal(config, NAME)
    if config.cpu_graph == "on":
        if refusal is not None:
            raise UnsupportedError(
                "cpu_graph on cannot be honoured", why=refusal.reason, remedy=refusal.remedy
            )
        return Decision(name=NAME, value="on", reason="decode steps are compiled", asked=True)
    if refusal is None:
        shape = shape_of(traits)
        found = [gain for gain in gains if (gain.shape, gain.dtype) == (shape, dtype)]
        if found and found[-1].pays:
            return Decision(name=NAME, value="on", reason=str(found[-1]))
        reason = str(found[-1]) if found else "nobody measured whether it pays on this CPU"
        remedy = "cpu_graph on" if found else f"cpu_graph on, or {MEASURE}"
        refusal = Refusal(subject=NAME, reason=reason, remedy=remedy)
    return Decision(name=NAME, value=OFF, reason="eager takes every step", refused=(refusal,))


def _refusal(hardware: Hardware, traits: ModelTraits) -> Refusal | None:
    if hardware.platform != "cpu":
        return Refusal(
            subject=NAME,
            reason=f"it compiles for a CPU, this is {hardware.platform}",
            remedy="cpu_graph auto or off; decode_graph is the GPU's",
        )
    if COMPILER not in hardware.packages:
        return Refusal(
            subject=NAME,
            reason="torch.compile writes C++, and there is no compiler for it",
            remedy=f"install {COMPILER}",
        )
    if traits.moe_layers:
        return Refusal(
            subject=NAME,
            reason="torch.compile is not given the grouped products of experts",
            remedy="cpu_graph auto or off",
        )
    return None
