"""What a path and its reference do not agree on, in words."""

from dataclasses import dataclass

from headrace.base.shown import first_of
from headrace.batch.facts import Bucket

SHOWN = 8  # sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One step whose path and reference differ by more than rounding.

    Attributes:
        layer: the first whose keys or values differ; `None`: none, the logits do.
        parts: which of "K" and "V" differ there.
        error: of the worst token there, relative to its size; of logits to their spread.
        times: as many times as rounding may explain.
        errors: by layer, the larger of K and V; logits last, where there are any.
        logit_difference: largest, absolute; `None` when no row samples.
        sequence, position: the worst token.
    """

    path: str
    bucket: Bucket
    backend: str
    layer: int | None
    parts: tuple[str, ...]
    error: float
    times: float
    errors: tuple[float, ...]
    logit_difference: float | None
    sequence: str
    position: int
    sequences: tuple[str, ...]

    @property
    def what(self) -> str:
        where = "the logits differ" if self.layer is None else f"{self._parts} differ first"
        logits = ""
        if self.logit_difference is not None:
            logits = f"; logits differ by up to {self.logit_difference:.2g}"
        bucket = f"{self.bucket.tokens} tokens, {self.bucket.sequences or 'any number of'} rows"
        if self.bucket.variant:
            bucket += f", {self.bucket.variant}"
        return (
            f"A step on {self.path} ({bucket}; attention {self.backend}) is not what its reference "
            f"says: {where}, by {self.error:.2g} of its size at position {self.position} of "
            f"{self.sequence}, {_times(self.times)} times what rounding may explain{logits}"
        )

    @property
    def _parts(self) -> str:
        return f"{' and '.join(self.parts)} of layer {self.layer}"

    @property
    def why(self) -> str:
        """Where to look: what lies between the last agreement and the first difference."""
        if self.layer is None:
            return (
                "all keys and values agree, so the last layer behind its KV, the last norm or the "
                "head went wrong"
            )
        before = "the embedding" if self.layer == 0 else f"layer {self.layer - 1} behind its KV"
        if self.parts == ("K",):
            return f"the values agree, so the projection, norm or rope of K in layer {self.layer}"
        if self.parts == ("V",):
            return f"the keys agree, so the projection of V in layer {self.layer}, or its writing"
        return (
            f"{before} (inputs, attention, MLP), the first norm and projection of layer "
            f"{self.layer}, or the writing of KV (slots, page table)"
        )

    @property
    def remedy(self) -> str:
        return f"Its sequences: {first_of(self.sequences, SHOWN)}"


def _times(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"
