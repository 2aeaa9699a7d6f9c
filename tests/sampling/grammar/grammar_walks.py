"""Random walks through grammars over a vocabulary of bytes and a few longer tokens."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.mask import GrammarMask
from headrace.sampling.grammar.xgrammar_backend import XgrammarBackend
from headrace.sampling.host_mask import allowed_line

END = 257
WORDS = [b'{"', b'": ', b", ", b'"}', b"\xc3", b"\xc3\xa9", b"QR", b"0.", b"true", b'\\"']
WORDS += [b'"\n', b'"\n, "']
PIECES = [*(bytes([byte]) for byte in range(256)), b"<s>", b"</s>", *WORDS]
VOCAB = len(PIECES) + 5  # a model's vocabulary is often padded
TOKENIZER: Any = SimpleNamespace(
    pieces=PIECES,
    special_ids=frozenset({256}),
    vocab_size=len(PIECES),
    token_id={"<s>": 256, "</s>": END}.get,
)


def backend() -> XgrammarBackend:
    return XgrammarBackend(TOKENIZER, VOCAB, [END])


class Ready:
    """A `PendingGrammar` that is there."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def poll(self, wait: float = 0.0) -> Any:
        return self._compiled


def mask_of(compiled: Any, stop_ids: frozenset[int] = frozenset({END}), **options: Any) -> Any:
    mask = GrammarMask(Ready(compiled), stop_ids, **options)
    assert mask.is_ready()
    return mask


def ids_of(line: torch.Tensor) -> list[int]:
    bits = np.unpackbits(line.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def allowed(mask: Any, output: list[int]) -> list[int]:
    return ids_of(allowed_line(mask, output, VOCAB))


def walk(compiled: Any, seed: int, *, limit: int = 300) -> bytes | None:
    """An answer drawn at random; `None` when it does not end within `limit` tokens."""
    draw = random.Random(seed)
    mask, output = mask_of(compiled), []
    closing = [ord(character) for character in '"}],']
    for place in range(limit):
        ids = allowed(mask, output)
        assert ids, f"nothing may follow {output}: {mask.failure}"
        likely = [token for token in (END, *closing) if token in ids]
        hurry = 0.3 + 0.6 * (place > limit / 3)
        token = draw.choice(likely if likely and draw.random() < hurry else ids)
        if token == END:
            return b"".join(PIECES[each] for each in output)
        assert token < len(PIECES)
        assert token not in (256, END)
        output.append(token)
    return None


def accepts(compiled: Any, text: str) -> bool:
    """Whether the text, byte by byte, is a whole answer."""
    mask, output = mask_of(compiled), []
    for byte in text.encode():
        if byte not in allowed(mask, output):
            return False
        output.append(byte)
    return END in allowed(mask, output)


def form(**options: Any) -> StructuredOutput:
    return StructuredOutput(**options)
