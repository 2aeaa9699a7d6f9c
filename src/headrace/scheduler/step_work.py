"""What a step does for whom, and what it will bring: kept until its results are processed."""

from dataclasses import dataclass

from headrace.scheduler.chooser import Share
from headrace.scheduler.pooling import StateParts
from headrace.scheduler.row_spans import RowSpan
from headrace.scheduler.sequence import Sequence
from headrace.scheduler.token_rows import RoutingRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Prompt logprobs that a step brings: those of tokens [first, first + count) of a prompt."""

    sequence: Sequence
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The shares of a step, and what it brings to them.

    Attributes:
        sampling: the shares that sample, in the order of the results.
        prompt_spans: prompt logprobs. state_parts: hidden states. routing: experts.
    """

    shares: list[Share]
    sampling: list[Share]
    prompt_spans: list[PromptSpan]
    state_parts: StateParts
    routing: list[RowSpan[RoutingRows]]

    @property
    def prompt_tokens(self) -> int:
        """New tokens that were known beforehand."""
        return sum(share.new_tokens for share in self.shares if not share.from_row)

    @property
    def decode_tokens(self) -> int:
        """New tokens that only the device may know."""
        return sum(share.from_row for share in self.shares)
