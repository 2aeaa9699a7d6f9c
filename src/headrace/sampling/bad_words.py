"""Words that must not appear."""

from collections.abc import Sequence

from torch import Tensor

from headrace.sampling.host_mask import set_bits


class BadWords:
    """A `HostMask`: words, as token ids, that must not be completed.

    A word of one token is forbidden always. The last token of a longer word is forbidden when the
    output ends with the tokens before it. A word counts only within the output, as in vLLM.
    """

    failure = ""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`words`: token ids of each word; none is empty."""
        assert all(words), "the tokeniser never gives an empty word"
        self._single = frozenset(word[0] for word in words if len(word) == 1)
        self._longer = tuple(tuple(word) for word in words if len(word) > 1)

    @property
    def needs_last_token(self) -> bool:
        return bool(self._longer)

    def is_ready(self, wait: float = 0.0) -> bool:
        return True

    def forbidden(self, output_ids: Sequence[int]) -> set[int]:
        """Token ids that would complete a word after `output_ids`."""
        tokens = set(self._single)
        for word in self._longer:
            start = word[:-1]
            if tuple(output_ids[-len(start) :]) == start:
                tokens.add(word[-1])
        return tokens

    def narrow(self, output_ids: Sequence[int], allowed: Tensor) -> None:
        set_bits(allowed, list(self.forbidden(output_ids)), allowed=False)
