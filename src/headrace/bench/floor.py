"""The floor of a step: the least time its arithmetic and its memory traffic can take.

Sum over operators of max(bytes / bandwidth, operations / matrix rate): the roofline of Williams,
Waterman and Patterson (2009) for each operator, one after the other. Bytes are those of weights
and KV; activations, norms, biases and the looked-up rows of the embedding stay out: together they
are less than a hundredth, and a good kernel keeps them in the cache.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.bench.ceilings import Ceilings
from headrace.config.persona import ModelTraits, MoeTraits
from headrace.runner.memory_sizes import ITEM_BYTES


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

    Experts are counted as if every token chose its own without looking at the others': the mean
    number of experts that a step reads then follows from the number of tokens.
    """

    def attended(window: int | None) -> tuple[float, float]:
        read = context if window is None else min(context, window)
        return read, read

    attention = _attention(traits, batch, kv_dtype, attended)
    return StepFloor(operators=(*_products(traits, batch, batch, dtype), *attention))


def prefill_floor(
    traits: ModelTraits, *, prompts: int, length: int, dtype: str, kv_dtype: str
) -> StepFloor:
    """Prompts of `length` tokens without a cached prefix, to the first token of each."""

    def attended(window: int | None) -> tuple[float, float]:
        whole = length if window is None else min(length, window)
        # Token i attends to i tokens until the window is full, then to the window.
        return length, whole * (whole + 1) / 2 + (length - whole) * whole

    attention = _attention(traits, prompts, kv_dtype, attended)
    return StepFloor(operators=(*_products(traits, prompts * length, prompts, dtype), *attention))


def _products(traits: ModelTraits, rows: int, head_rows: int, dtype: str) -> Iterator[Operator]:
    """Products of `rows` tokens with every weight; the head sees those that sample."""
    attention, hidden = traits.attention, traits.hidden_size
    keys = attention.num_kv_heads * (attention.head_dim + attention.v_head_dim)
    shapes = {
        "qkv": hidden * (attention.num_heads * attention.head_dim + keys),
        "o": attention.num_heads * attention.v_head_dim * hidden,
    }
    mlp = {
        "gate up": hidden * 2 * traits.intermediate_size,
        "down": traits.intermediate_size * hidden,
    }
    size, routed = ITEM_BYTES[dtype], len(traits.moe_layers)
    for part, count in ((shapes, traits.num_layers), (mlp, traits.num_layers - routed)):
        for name, weights in part.items():
            if count:
                work = 2 * rows * weights
                yield Operator(name=name, bytes=weights * size, operations=work, count=count)
    if traits.moe is not None and routed:
        yield from _experts(traits.moe, hidden, rows, routed, size)
    head = traits.vocab_size * hidden
    yield Operator(name="head", bytes=head * size, operations=2 * head_rows * head)


def _experts(moe: MoeTraits, hidden: int, rows: int, layers: int, size: int) -> Iterator[Operator]:
    """Router and experts of `rows` tokens; the router is float32."""
    router, chosen = moe.num_experts * hidden, moe.num_experts_per_tok
    yield Operator(
        name="router",
        bytes=router * ITEM_BYTES["float32"],
        operations=2 * rows * router,
        count=layers,
    )
    read = moe.num_experts * (1 - (1 - chosen / moe.num_experts) ** rows)
    for name, parts in (("expert gate up", 2), ("expert down", 1)):
        weights = parts * hidden * moe.intermediate_size
        yield Operator(
            name=name,
            bytes=read * weights * size,
            operations=2 * rows * chosen * weights,
            count=layers,
        )


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
