"""Hidden states of one continuation as plain bytes, for messages and for faces without torch."""

import msgspec


class PackedStates(msgspec.Struct, array_like=True, frozen=True):
    """States of consecutive positions.

    Attributes:
        data: little-endian numbers of `dtype`, [rows, layers, hidden_size].
        rows: one per position. hidden_size: numbers of a state.
        dtype: torch's name of it: float32, bfloat16 or float16.
        first_position: that of the first row; the prompt begins at 0.
        layers: which states a row holds, 0 (the embedding) to the number of layers (behind the last
            norm), in the order that the request asked for.
    """

    data: bytearray
    rows: int
    hidden_size: int
    dtype: str
    first_position: int
    layers: tuple[int, ...]
