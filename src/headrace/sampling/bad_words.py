"""Tokens that the host forbids for one step: bad words now, grammars later."""

from collections.abc import Collection, Sequence
from typing import Protocol


class HostMask(Protocol):
    """What may not come next, decided on the host from the output so far.

    Attributes:
        needs_last_token: the answer depends on the output, so a step must wait for the token of
            the step before; otherwise it is the same at every step.
    """

    @property
    def needs_last_token(self) -> bool: ...

    def forbidden(self, output_ids: Sequence[int]) -> Collection[int]:
        """Token ids that must not follow `output_ids` (the output alone, no prompt)."""


class BadWords:
    """Words, as token ids, that must not be completed.

    A word of one token is forbidden always; `single_token_ids` lets the caller write those into
    the row's bias once. The last token of a longer word is forbidden when the output ends with the
    tokens before it. A word counts only within the output, as in vLLM.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`words`: token ids of each word; none is empty."""
        assert all(words), "the tokeniser never gives an empty word"
        self.single_token_ids = frozenset(word[0] for word in words if len(word) == 1)
        self._longer = tuple(tuple(word) for word in words if len(word) > 1)

    @property
    def needs_last_token(self) -> bool:
        return bool(self._longer)

    def forbidden(self, output_ids: Sequence[int]) -> set[int]:
        """Token ids that would complete a word after `output_ids`."""
        tokens = set(self.single_token_ids)
        for word in self._longer:
            start = word[:-1]
            if tuple(output_ids[-len(start) :]) == start:
                tokens.add(word[-1])
        return tokens
