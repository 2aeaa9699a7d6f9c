"""How many tokens a sequence may have, prompt and output together."""

from headrace.base.decision import Decision
from headrace.base.errors import TooLongError, longest_context


class LengthLimits:
    """The bounds of every sequence: the context, and the whole KV pool.

    Args:
        context: tokens of the context, and what set it. pool_tokens: tokens that the KV pool holds.
    """

    def __init__(self, context: Decision[int], pool_tokens: int) -> None:
        self._context, self._pool_tokens = context, pool_tokens

    def longest_output(self, prompt_length: int) -> int:
        """Tokens that can follow a prompt of this length; below 1 when the prompt does not fit."""
        by_pool = self._pool_tokens + 1  # the last token is never read back
        return min(self._context.value, by_pool) - prompt_length

    def check(self, prompt_length: int, max_tokens: int) -> None:
        """Raise `TooLongError` when prompt and output, 0 for an embedding, can never fit."""
        total = prompt_length + max_tokens
        needed, remedy = f"The prompt has {prompt_length} tokens", "Shorten the prompt"
        less = ", lower max_tokens" if max_tokens else ""
        if max_tokens:
            needed += f" and its output needs {max_tokens}"
        if total > self._context.value:
            raise TooLongError(
                f"{needed}: {total} together" if max_tokens else needed,
                why=f"{longest_context(self._context.value)}: {self._set_by()}",
                remedy=f"{remedy}, or lower max_tokens or min_tokens" if max_tokens else remedy,
            )
        if total - min(max_tokens, 1) > self._pool_tokens:  # the last is never read back
            raise TooLongError(
                needed,
                why=f"the KV pool holds {self._pool_tokens} tokens in all",
                remedy=f"{remedy}{less} or raise max_total_tokens",
            )

    def _set_by(self) -> str:
        """What holds the context where it is: only options that were asked for are blamed."""
        length = self._context
        if length.asked:
            return "max_model_len asks for it"
        return length.refused[0].reason if length.refused else length.reason
