"""Tokens of reasoning, for `usage`: exact, or not told."""

from collections.abc import Callable, Sequence


class ReasoningCount:
    """Counts the tokens of one choice from the begin marker of reasoning to its end marker, both
    included, where each is one token.

    Args:
        begin, end: ids of the markers.
        is_open: the prompt has the begin marker already.
        is_space: whether a token is white space, which may stand before the begin marker.
    """

    def __init__(
        self, begin: int, end: int, *, is_open: bool, is_space: Callable[[int], bool]
    ) -> None:
        self._begin, self._end, self._is_space = begin, end, is_space
        self._is_open, self._is_past = is_open, False
        self._count = 0

    def push(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._is_past:
                return
            if self._is_open:
                self._count += 1
                self._is_past = token == self._end
            elif token == self._begin:
                self._is_open = True
                self._count = 1
            else:
                self._is_past = not self._is_space(token)

    def value(self, *, has_reasoning: bool, has_more: bool) -> int | None:
        """The count; `None` where the text shows that markers were spelled out.

        Args:
            has_reasoning: the text has some. has_more: it has something behind it.
        """
        spelled_begin = has_reasoning and not self._is_open
        spelled_end = has_more and self._is_open and not self._is_past
        return None if spelled_begin or spelled_end else self._count
