"""How far two right computations of one step may lie apart, by dtype.

Measured are compiled pieces and single rows against the reference on a CPU, SmolLM2-135M and
Gemma-3-270M over random token ids, which take a model to places where rounding grows fastest. The
worst token of all steps, in layer 0, in the last layer, and in the logits (root mean square):

| dtype    | layer 0 | last layer | logits |
|----------|---------|------------|--------|
| float32  | 3.5e-7  | 5e-6       | 1e-5   |
| bfloat16 | 4e-3    | 0.29       | 0.91   |
| float16  | 1e-3    | 1.9e-2     | 2.4e-2 |

So the bounds of float32 find whatever is no rounding. In half precision the first layers are judged
finely and deep ones grossly: there a wrong row, page or rope is found, a slightly wrong number not.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds for the worst token of a step (`closeness.py`).

    Attributes:
        layer_step: by how much of their size K and V may differ in layer 0; by (1 + i) times as
            much in layer i, since every layer adds to and passes on what came before.
        most: no layer may differ by more; vectors that have nothing in common differ by 1.4.
        logits: root mean square of a row's differences, in standard deviations of its logits.
        single_logit: the largest difference of one logit, likewise.
    """

    layer_step: float
    most: float
    logits: float
    single_logit: float

    def layer(self, index: int) -> float:
        return min(self.most, self.layer_step * (1 + index))


TOLERANCES = {
    "float32": Tolerance(layer_step=1e-5, most=2e-4, logits=5e-4, single_logit=2e-3),
    "bfloat16": Tolerance(layer_step=0.025, most=0.6, logits=1.2, single_logit=8.0),
    "float16": Tolerance(layer_step=0.004, most=0.15, logits=0.15, single_logit=1.0),
}
