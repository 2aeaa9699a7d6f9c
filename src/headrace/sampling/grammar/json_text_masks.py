"""Keeps control characters out of JSON strings: xgrammar lets them into strings with lengths.

(Lengths written as patterns would do without this, but cost a thousand times as much a step.)
"""

import re
from collections.abc import Sequence
from enum import IntEnum

from torch import Tensor

from headrace.sampling.host_mask import mask_line

_CONTROL = re.compile(rb"[\x00-\x1f]")


class JsonPlace(IntEnum):
    """Where a JSON text stands."""

    OUTSIDE = 0
    STRING = 1
    ESCAPE = 2  # in a string, behind a backslash


def place_after(place: JsonPlace, piece: bytes) -> JsonPlace | None:
    """Where the text stands after more of it; `None` where that puts a control character into a
    string."""
    for byte in piece:
        if place is JsonPlace.OUTSIDE:
            if byte == ord('"'):
                place = JsonPlace.STRING
        elif byte < 0x20:
            return None
        elif place is JsonPlace.ESCAPE:
            place = JsonPlace.STRING
        elif byte == ord("\\"):
            place = JsonPlace.ESCAPE
        elif byte == ord('"'):
            place = JsonPlace.OUTSIDE
    return place


class JsonTextMasks:
    """Tokens that put no control character into a string.

    Args:
        pieces: bytes of each token.
        vocab_size: V of the model.
    """

    def __init__(self, pieces: Sequence[bytes], vocab_size: int) -> None:
        risky = [token for token, piece in enumerate(pieces) if _CONTROL.search(piece)]
        self._lines = [
            mask_line(
                [token for token in risky if place_after(place, pieces[token]) is None], vocab_size
            )
            for place in JsonPlace
        ]

    def narrow(self, line: Tensor, place: JsonPlace) -> None:
        """Clear in `line` [W] int32 what cannot follow a text that stands at `place`."""
        line &= self._lines[place]
