"""Token ids of one sequence in, text out, without ever cutting a character.

What comes out, joined, is the decoding of all ids that went in.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from headrace.text.pieces import Pieces
from headrace.text.tokenizer import Tokenizer

# A character has at most four bytes, so three pieces of the prompt can be left open at its end;
# the rest is room for pieces without text.
_PROMPT_TAIL = 8
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one sequence as its tokens arrive.

    With a prompt the text goes on where the prompt ended: the space before the first word stays
    (sentencepiece drops it only at the start of a text), and a character whose first bytes were the
    prompt's last is given whole.

    Args:
        prompt_ids: ids before the first one pushed; only their last few matter.
        skip_special_tokens: give no text for control tokens.
    """

    __slots__ = ("_stream", "push")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        stream: _Stream
        if tokenizer.pieces is not None:
            hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
            stream = _PieceStream(tokenizer.pieces, hidden, prompt_ids)
        else:
            stream = _WindowStream(tokenizer, prompt_ids, skip_special_tokens)
        self._stream = stream
        self.push = stream.push
        """push(token_id) -> str: the text that became certain with this token."""

    def finish(self) -> str:
        """What was held back for a character that never came whole."""
        return self._stream.finish()


class _Stream(Protocol):
    def push(self, token_id: int, /) -> str: ...

    def finish(self) -> str: ...


class _PieceStream:
    """An incremental UTF-8 decoder over the bytes of the tokens."""

    __slots__ = ("_decode", "_hidden", "_pieces", "_strip")

    def __init__(
        self,
        pieces: Pieces,
        hidden: frozenset[int],
        prompt_ids: Sequence[int],
    ) -> None:
        rules = pieces.rules
        self._pieces, self._hidden = pieces, hidden
        self._decode = codecs.getincrementaldecoder("utf-8")(rules.errors).decode
        self._strip = rules.strips_leading_space and not any(
            pieces[token_id] for token_id in prompt_ids if token_id not in hidden
        )
        for token_id in prompt_ids[-_PROMPT_TAIL:]:
            if token_id not in hidden:
                self._decode(pieces[token_id])

    def push(self, token_id: int, /) -> str:
        if token_id in self._hidden:
            return ""
        text = self._decode(self._pieces[token_id])
        return self._without_first_space(text) if self._strip and text else text

    def finish(self) -> str:
        text = self._decode(b"", True)
        return self._without_first_space(text) if self._strip and text else text

    def _without_first_space(self, text: str) -> str:
        self._strip = False
        return text.removeprefix(" ")


class _WindowStream:
    """For decoders we know nothing about: decode the last few ids with and without the new ones.

    The method of text-generation-inference and vLLM (prefix offset, read offset). Exact as long as
    a token changes the text of its neighbours only.
    """

    __slots__ = ("_decode", "_ids", "_known", "_size", "_skip")

    _PATIENCE = 8  # tokens without a whole character after which broken text is let through

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._decode, self._size, self._skip = (
            tokenizer.decode,
            tokenizer.vocab_size,
            skip_special_tokens,
        )
        self._ids = list(prompt_ids[-_PROMPT_TAIL:])
        self._known = len(self._ids)  # ids before this one have been shown

    def push(self, token_id: int, /) -> str:
        if not 0 <= token_id < self._size:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        waiting = text.endswith(_REPLACEMENT) and len(self._ids) - self._known < self._PATIENCE
        if not text or waiting:
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._known], skip_special_tokens=self._skip)
        after = self._decode(self._ids, skip_special_tokens=self._skip)
        return after[len(before) :]

    def _advance(self) -> None:
        self._ids = self._ids[self._known :] or self._ids
        self._known = len(self._ids)
