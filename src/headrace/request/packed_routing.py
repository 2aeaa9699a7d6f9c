"""Experts of the tokens of one continuation as plain bytes, for messages and for faces."""

import msgspec


class PackedRouting(msgspec.Struct, array_like=True, frozen=True):
    """Experts of the positions from 0, the first token of the prompt, on.

    Attributes:
        data: little-endian int32, [rows, layers, chosen]: numbers of experts, that with the largest
            weight first.
        rows: one per position; the last output token has none, since it was never read.
        layers: that have experts, in their order.
    """

    data: bytearray
    rows: int
    layers: int
    chosen: int
