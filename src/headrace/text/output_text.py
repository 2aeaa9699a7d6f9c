"""The visible text of one sequence: detokeniser and stop strings joined."""

from collections.abc import Sequence

from headrace.text.detokenizer import Detokenizer
from headrace.text.stop_matcher import StopMatcher
from headrace.text.tokenizer import Tokenizer


class OutputText:
    """Text of one sequence as it may be shown.

    The token that ended a sequence as a stop id is not pushed by the caller unless it should show.

    Args:
        prompt_ids: ids the text goes on from.
        stops: stop strings; the first one completed ends the text before it, or after it with
            `include_stop`. One that is the text of a special token stops at that token, shown or
            not.
        min_tokens: stop strings are looked for only in the text of later tokens.
    """

    __slots__ = ("_detokenizer", "_hidden_stops", "_matcher", "_shown", "_unwatched")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._matcher = StopMatcher(stops, include_stop)
        ids = {tokenizer.token_id(stop): stop for stop in stops if skip_special_tokens}
        self._hidden_stops = {token: ids[token] for token in tokenizer.special_ids & ids.keys()}
        self._shown: list[str] = []
        self._unwatched = min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    @property
    def text(self) -> str:
        """All that was shown so far."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Take the next token; the text that may be shown now. Nothing comes after a stop."""
        if self._matcher.matched is not None:
            return ""
        text = self._detokenizer.push(token_id)
        if self._unwatched > 0:
            self._unwatched -= 1
            return self._show(text)
        if token_id in self._hidden_stops:
            return self._stop_at(self._hidden_stops[token_id])
        return self._show(self._matcher.push(text)) if text else ""

    def finish(self) -> str:
        """The sequence ended: everything still held back. `stopped` may be set by it."""
        if self._matcher.matched is not None:
            return ""
        return self._show(self._matcher.push(self._detokenizer.finish()) + self._matcher.flush())

    def _stop_at(self, stop: str) -> str:
        text = self._matcher.push(self._detokenizer.finish())
        if self._matcher.matched is None:
            text += self._matcher.stop_here(stop)
        return self._show(text)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
