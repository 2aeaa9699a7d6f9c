"""Whether prefills and mixed steps of few tokens are replayed, and how bodies are recorded."""

from headrace.base.decision import Decision, Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import ModelTraits
from headrace.config.plan import OFF
from headrace.runner.choices.deterministic import deterministic_refusal

NAME = "prefill_graph"
BREAKABLE, PIECEWISE = "breakable", "piecewise"
REASONS = {
    BREAKABLE: "the model between attention calls is captured as it is",
    PIECEWISE: "the model between attention calls is compiled by torch.compile, then captured",
}


def choose_prefill_graph(
    config: EngineConfig, hardware: Hardware, traits: ModelTraits
) -> Decision[str]:
    """Off, breakable or piecewise.

    Raises:
        UnsupportedError: one was asked for and cannot be.
    """
    asked = config.prefill_graph
    if asked == OFF:
        return Decision(name=NAME, value=OFF, reason="asked to be off", asked=True)
    wanted = BREAKABLE if asked == "auto" else asked
    refusal = _refusal(wanted, hardware, traits)
    if refusal is None and wanted == PIECEWISE:
        refusal = deterministic_refusal(config, NAME)
    if asked != "auto":
        if refusal is not None:
            raise UnsupportedError(
                f"prefill_graph {asked} cannot be honoured",
                why=refusal.reason,
                remedy=refusal.remedy or f"Use auto or off for {NAME}",
            )
        return Decision(name=NAME, value=asked, reason=REASONS[asked], asked=True)
    if refusal is not None:
        reason = "eager takes every prefill"
        return Decision(name=NAME, value=OFF, reason=reason, refused=(refusal,))
    other = Refusal(
        subject=PIECEWISE,
        reason="it compiles for seconds at every bucket",
        remedy="prefill_graph piecewise",
    )
    return Decision(name=NAME, value=wanted, reason=REASONS[wanted], refused=(other,))


def _refusal(wanted: str, hardware: Hardware, traits: ModelTraits) -> Refusal | None:
    if hardware.platform != "cuda":
        return Refusal(subject=NAME, reason="CUDA graphs need a CUDA device")
    if "triton" not in hardware.packages:
        needs = {
            BREAKABLE: "it is made for the fused kernels, which are written in Triton",
            PIECEWISE: "torch.compile writes Triton for a GPU",
        }
        return Refusal(subject=NAME, reason=needs[wanted], remedy="pip install 'headrace[cuda]'")
    if wanted == PIECEWISE and traits.moe_layers:
        return Refusal(
            subject=NAME,
            reason="torch.compile is not given the grouped products of experts",
            remedy="prefill_graph breakable",
        )
    return None
