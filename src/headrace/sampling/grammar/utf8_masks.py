"""Keeps answers valid UTF-8: xgrammar lets longer spellings of a character pass (E0 9A 8A)."""

import codecs
from collections.abc import Mapping, Sequence

from torch import Tensor

from headrace.sampling.host_mask import mask_line

# Lead bytes after which not every continuation byte may follow (RFC 3629), and those that may.
_SECOND_BYTES: Mapping[int, range] = {
    0xE0: range(0xA0, 0xC0),
    0xED: range(0x80, 0xA0),
    0xF0: range(0x90, 0xC0),
    0xF4: range(0x80, 0x90),
}
_CONTINUATION = range(0x80, 0xC0)


class Utf8Masks:
    """Tokens that may follow, as far as UTF-8 is concerned, where grammars are not strict enough.

    Args:
        pieces: bytes of each token.
        vocab_size: V of the model.
    """

    def __init__(self, pieces: Sequence[bytes], vocab_size: int) -> None:
        broken: list[int] = []
        after: dict[int, list[int]] = {lead: [] for lead in _SECOND_BYTES}
        for token, piece in enumerate(pieces):
            if piece.isascii():
                continue
            if not _is_fragment(piece):
                broken.append(token)
            if piece[0] in _CONTINUATION:
                for lead, seconds in _SECOND_BYTES.items():
                    if piece[0] not in seconds:
                        after[lead].append(token)
        self._always = mask_line(broken, vocab_size) if broken else None
        self._after = {
            lead: mask_line(broken + tokens, vocab_size) for lead, tokens in after.items()
        }

    def narrow(self, line: Tensor, last_byte: int) -> None:
        """Clear in `line` [W] int32 what cannot follow an answer that ends with `last_byte`."""
        mask = self._after.get(last_byte, self._always)
        if mask is not None:
            line &= mask


def _is_fragment(piece: bytes) -> bool:
    """Whether the bytes can stand within valid UTF-8."""
    start = 0
    while start < min(3, len(piece)) and piece[start] in _CONTINUATION:
        start += 1
    try:
        codecs.getincrementaldecoder("utf-8")().decode(piece[start:])
    except UnicodeDecodeError:
        return False
    return True
