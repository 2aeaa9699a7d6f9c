"""Whether decode steps are replayed, and at which numbers of rows; when graphs are captured."""

from collections.abc import Iterator

from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.base.decision import Decision, Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.plan import OFF

NAME = "decode_graph"


def choose_decode_graph(
    config: EngineConfig, hardware: Hardware, *, backend: str, most: int
) -> Decision[str | tuple[int, ...]]:
    """Rows of the decode graphs, or off.

    Raises:
        UnsupportedError: sizes were asked and no graph can be captured, or they exceed the rows.
    """
    asked = config.decode_graph
    if asked == OFF:
        return Decision(name=NAME, value=OFF, reason="asked to be off", asked=True)
    refusal = _refusal(hardware, backend)
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
        return Decision(name=NAME, value=tuple(sorted(set(asked))), reason="sizes", asked=True)
    if refusal is not None:
        reason = "eager takes every decode step"
        return Decision(name=NAME, value=OFF, reason=reason, refused=(refusal,))
    reason = "rows of the buckets: close together where few rows make padding dear"
    return Decision(name=NAME, value=decode_sizes(most), reason=reason)


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 32 beyond; `most` is the last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return (*(size for size in sizes if size < most), most)


def capture_conflicts(config: EngineConfig, hardware: Hardware) -> Iterator[str]:
    """Why nothing would be captured."""
    off = config.decode_graph == config.prefill_graph == OFF
    if config.capture == "all" and (off or hardware.platform != "cuda"):
        why = "both graphs are off" if off else f"the device is a {hardware.platform}"
        yield f"capture all was asked and nothing is captured: {why} (use capture need)"


def _refusal(hardware: Hardware, backend: str) -> Refusal | None:
    if hardware.platform != "cuda":
        return Refusal(subject=NAME, reason="CUDA graphs need a CUDA device")
    if "triton" not in hardware.packages:
        return Refusal(
            subject=NAME,
            reason="preparation and sampling inside the graph are Triton kernels",
            remedy="pip install 'headrace[cuda]'",
        )
    if not any(entry.capabilities.graph_decode for entry in ATTENTION_BACKENDS.entries(backend)):
        return Refusal(
            subject=NAME,
            reason=f"attention backend {backend} cannot be captured",
            remedy="decode_attention_backend triton",
        )
    return None
