"""How far two right computations of one step may lie apart, by dtype.

What rounding does to a token differs by orders of magnitude from token to token: a model amplifies
it on the way through its layers, most of all over ids that make no sense. Measured over random ids,
compiled pieces against the reference on a CPU, the worst token of all steps (part of the size of
its K or V; logits: root mean square in standard deviations):

| dtype    | layer 0 | last layer | logits | Gemma-3-270M and SmolLM2-135M |
|----------|---------|------------|--------|-------------------------------|
| float32  | 3.5e-7  | 5e-6       | 1e-5   |                               |
| bfloat16 | 4e-3    | 0.29       | 0.91   | median 0.02 in the last layer |
| float16  | 1e-3    | 1.9e-2     | 2.4e-2 |                               |

So the canary measures it for the very step: the reference runs once more with its residual stream
shaken by one rounding in front of every layer. The path may differ from the reference by `TIMES` as
much as that changed, plus a floor. Of single tokens in single layers, some ten thousand, the error
was at most 4.3 times that change, for one in a hundred more than 1.9 times; no step came closer to
its bound than 0.6 of it.

Two dumps have no such measure; for them the bounds grow with the layers and are wide.
"""

from dataclasses import dataclass

TIMES = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds of a dtype.

    Attributes:
        rounding: of a number, relative: how strongly the canary shakes.
        floor, logit_floor: what the canary allows beside: of K and V, of logits.
        layer_step: by how much of their size K and V of two dumps may differ in layer 0; by (1 + i)
            times as much in layer i.
        most: no layer may differ by more; vectors that have nothing in common differ by 1.4.
        logits, single_logit: of two dumps: root mean square and largest difference of a row.
    """

    rounding: float
    floor: float
    logit_floor: float
    layer_step: float
    most: float
    logits: float
    single_logit: float

    def layer(self, index: int) -> float:
        """Of two dumps."""
        return min(self.most, self.layer_step * (1 + index))


TOLERANCES = {
    "float32": Tolerance(
        rounding=2**-23,  # half of that would be rounded off
        floor=1e-5,
        logit_floor=5e-4,
        layer_step=1e-5,
        most=2e-4,
        logits=5e-4,
        single_logit=2e-3,
    ),
    "bfloat16": Tolerance(
        rounding=2**-8,
        floor=0.02,
        logit_floor=0.05,
        layer_step=0.025,
        most=0.6,
        logits=1.2,
        single_logit=8.0,
    ),
    "float16": Tolerance(
        rounding=2**-11,
        floor=0.003,
        logit_floor=0.01,
        layer_step=0.004,
        most=0.15,
        logits=0.15,
        single_logit=1.0,
    ),
}
