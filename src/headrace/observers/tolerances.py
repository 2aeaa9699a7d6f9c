"""How far two right computations of one step may lie apart, by dtype."""

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    first: float
    head: float

    def layer(self, index: int) -> float:
        return self.first * sqrt(1 + index)

    def logits(self, layers: int) -> float:
        return self.head


TOLERANCES = {
    "float32": Tolerance(first=1e-5, head=1e-3),
    "bfloat16": Tolerance(first=2e-2, head=0.3),
    "float16": Tolerance(first=2e-3, head=0.03),
}
