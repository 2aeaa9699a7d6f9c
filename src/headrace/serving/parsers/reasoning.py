"""How a family of models marks its reasoning, and the registry of families."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.base.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParser:
    """One family.

    Attributes:
        pairs: (begin, end) markers.
        open_at_start: the answer begins inside of reasoning although neither it nor the prompt
            shows the begin marker.
        anywhere: reasoning may begin anywhere in the answer, not only at its start.
    """

    pairs: tuple[tuple[str, str], ...]
    open_at_start: bool = False
    anywhere: bool = False

    def end_awaited(self, prompt: str) -> str:
        """The end marker that an answer to this prompt begins before; empty: it does not.

        Templates end the prompt with the begin marker to make a model think, or with an empty
        block to keep it from it.
        """
        tail = prompt.rstrip()
        for begin, end in self.pairs:
            if tail.endswith(begin):
                return end
            if tail.endswith(end):
                return ""
        return self.pairs[0][1] if self.open_at_start else ""

    def marker_before(self, message: str) -> str:
        """The marker that an answer which goes on with `message` stands behind: the last one of it,
        or an end marker, as content without any is not reasoning."""
        words = [word for pair in self.pairs for word in pair]
        last = max(words, key=message.rfind)
        return last if last in message else self.pairs[0][1]


REASONING_PARSERS: Registry[ReasoningParser] = Registry(
    "reasoning parser", "headrace.reasoning_parsers"
)


def register_reasoning_parser(*names: str) -> Callable[[ReasoningParser], ReasoningParser]:
    """Make a family known under these names; third parties by the entry-point group
    `headrace.reasoning_parsers`."""
    return REASONING_PARSERS.register(*names)


_THINK = ("<think>", "</think>")

register_reasoning_parser("think", "qwen3")(ReasoningParser(pairs=(_THINK,)))
register_reasoning_parser("deepseek_r1", "deepseek-r1")(
    ReasoningParser(pairs=(_THINK,), open_at_start=True)
)
register_reasoning_parser("mistral", "magistral")(
    ReasoningParser(pairs=(("[THINK]", "[/THINK]"), _THINK), anywhere=True)
)
