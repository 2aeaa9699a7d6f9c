"""The floor of a step: the least time its arithmetic and its memory traffic can take.

Sum over operators of max(bytes / bandwidth, operations / matrix rate): the roofline of Williams,
Waterman and Patterson (2009) for each operator, one after the other. Bytes are those of weights
and KV; activations, norms, biases and the looked-up rows of the embedding stay out: together they
are less than a hundredth, and a good kernel keeps them in the cache.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.base.errors import UnsupportedError
from headrace.bench.ceilings import Ceilings
from headrace.config.persona import ModelTraits
from headrace.runner.memory_table import ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One kind of work of a step, done `count` times with so many bytes and operations each."""

    name: str
    bytes: float
    operations: float
    count: int = 1

    def seconds(self, ceilings: Ceilings) -> float:
        once = max(self.bytes / ceilings.bandwidth, self.operations / ceilings.matrix_rate)
        return self.count * once


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    operators: tuple[Operator, ...]

    @property
    def bytes(self) -> float:
        return sum(each.count * each.bytes for each in self.operators)

    @property
    def operations(self) -> float:
        return sum(each.count * each.operations for each in self.operators)

    def seconds(self, ceilings: Ceilings) -> float:
        return sum(each.seconds(ceilings) for each in self.operators)


def decode_floor(
    traits: ModelTraits, *, batch: int, context: float, dtype: str, kv_dtype: str
) -> StepFloor:
    """A step that makes one token for each of `batch` sequences.

    Args:
        context: tokens whose KV each sequence reads, its new one included; a mean may be a
            fraction.

    Raises:
        UnsupportedError: a mixture of experts, whose traffic depends on the routing.
    """

    def attended(window: int | None) -> tuple[float, float]:
        read = context if window is None else min(context, window)
        return read, read

    attention = _attention(traits, batch, kv_dtype, attended)
    return StepFloor(operators=(*_products(traits, batch, batch, dtype), *attention))


def prefill_floor(
    traits: ModelTraits, *, prompts: int, length: int, dtype: str, kv_dtype: str
) -> StepFloor:
    """Prompts of `length` tokens without a cached prefix, to the first token of each.

    Raises:
        UnsupportedError: a mixture of experts.
    """

    def attended(window: int | None) -> tuple[float, float]:
        whole = length if window is None else min(length, window)
        # Token i attends to i tokens until the window is full, then to the window.
        return length, whole * (whole + 1) / 2 + (length - whole) * whole

    attention = _attention(traits, prompts, kv_dtype, attended)
    return StepFloor(operators=(*_products(traits, prompts * length, prompts, dtype), *attention))


def _products(traits: ModelTraits, rows: int, head_rows: int, dtype: str) -> Iterator[Operator]:
    """Products of `rows` tokens with every weight; the head sees those that sample."""
    if traits.is_moe:
        raise UnsupportedError(
            f"The floor of a mixture of experts ({traits.family}) is not known",
            why="how many weights a step reads depends on the routing",
            remedy="Measure a dense model",
        )
    attention, hidden = traits.attention, traits.hidden_size
    keys = attention.num_kv_heads * (attention.head_dim + attention.v_head_dim)
    shapes = {
        "qkv": hidden * (attention.num_heads * attention.head_dim + keys),
        "o": attention.num_heads * attention.v_head_dim * hidden,
        "gate up": hidden * 2 * traits.intermediate_size,
        "down": traits.intermediate_size * hidden,
    }
    size = ITEM_BYTES[dtype]
    for name, weights in shapes.items():
        yield Operator(
            name=name,
            bytes=weights * size,
            operations=2 * rows * weights,
            count=traits.num_layers,
        )
    head = traits.vocab_size * hidden
    yield Operator(name="head", bytes=head * size, operations=2 * head_rows * head)


def _attention(
    traits: ModelTraits,
    sequences: int,
    kv_dtype: str,
    attended: Callable[[int | None], tuple[float, float]],
) -> Iterator[Operator]:
    """`attended` of a window: tokens of KV moved, and pairs of query and key, per sequence."""
    attention = traits.attention
    widths = attention.head_dim + attention.v_head_dim
    for window, count in Counter(layer.window for layer in traits.layers).items():
        moved, pairs = attended(window)
        yield Operator(
            name="attention" if window is None else f"attention, window {window}",
            bytes=sequences * moved * attention.num_kv_heads * widths * ITEM_BYTES[kv_dtype],
            operations=2 * sequences * pairs * attention.num_heads * widths,
            count=count,
        )
