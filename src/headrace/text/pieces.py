"""The bytes that each token stands for.

Nearly every tokenizer decodes by joining bytes: byte-level BPE writes each byte as a printable
character, sentencepiece writes a space as U+2581 and an unknown byte as `<0x0A>`. Knowing the
bytes makes streaming exact and cheap: an incremental UTF-8 decoder over the pieces is all it takes.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "headrace.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def byte_alphabet() -> dict[int, str]:
    """Byte -> printable character, as GPT-2's byte-level BPE spells it.

    Printable Latin-1 stands for itself, the other bytes for U+0100 onwards in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    spelled = {byte: chr(byte) for byte in printable}
    spelled.update((byte, chr(0x100 + order)) for order, byte in enumerate(others))
    return spelled


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRules:
    """How a token's text becomes bytes, and bytes become text.

    `errors` names what invalid UTF-8 turns into: one U+FFFD for each broken character (byte-level
    BPE) or for each byte (sentencepiece). `strips_leading_space`: the first space of the whole text
    was added by the tokenizer and is taken away again.
    """

    to_bytes: Callable[[str], bytes]
    errors: str
    strips_leading_space: bool = False

    def text(self, pieces: Sequence[bytes]) -> str:
        text = b"".join(pieces).decode("utf-8", self.errors)
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text


def rules_of(decoder: Any) -> PieceRules | None:
    """Rules for a decoder as tokenizer.json writes it; None when it is not a join of bytes."""
    if not isinstance(decoder, dict):
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(to_bytes=_byte_level, errors="replace")
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_metaspace(steps[0]):
        if len(steps) == 3:
            return PieceRules(to_bytes=_sentencepiece, errors=_EACH_BYTE)
        if len(steps) == 4 and _is_leading_space(steps[3]):
            return PieceRules(to_bytes=_sentencepiece, errors=_EACH_BYTE, strips_leading_space=True)
    return None


class Pieces(dict[int, bytes]):
    """Token id -> its bytes, filled as asked; an id that means nothing gives no bytes.

    Ids beyond the vocabulary are legal: embeddings are often padded and such a row can win.
    """

    __slots__ = ("_size", "_token_of", "rules")

    def __init__(
        self, rules: PieceRules, token_of: Callable[[int], str | None], vocab_size: int
    ) -> None:
        super().__init__()
        self.rules, self._token_of, self._size = rules, token_of, vocab_size

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._size:
            return b""
        token = self._token_of(token_id)
        self[token_id] = piece = b"" if token is None else self.rules.to_bytes(token)
        return piece


def _byte_level(token: str) -> bytes:
    """An added token outside the byte alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(METASPACE, " ").encode()


def _is_metaspace(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": METASPACE} and step["content"] == " ")


def _is_leading_space(step: dict[str, Any]) -> bool:
    return bool(
        step["type"] == "Strip"
        and step["content"] == " "
        and (step["start"], step["stop"]) == (1, 0)
    )
