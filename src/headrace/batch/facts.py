"""Plain facts about a batch, for the selector of paths, and the key a graph is captured at."""

from dataclasses import dataclass
from enum import IntEnum

from headrace.batch.forward_mode import ForwardMode


class HiddenMode(IntEnum):
    """Which hidden states leave the forward; ordered, a batch takes the highest of its rows."""

    NONE = 0
    LAST = 1
    ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What a path needs to know to admit a batch; the same on all ranks that share a collective.

    Attributes:
        tokens, live_tokens: tokens of the step, and those that belong to live rows (0 in warm-up).
        sequences: rows of the step.
        max_length: upper bound of the lengths after the step.
        has_prefix: some row reads KV written by an earlier step.
        prompt_logprobs: logits of more than each row's last token are needed.
        host_mask: a row brings a mask that the host made for this step (grammar, bad words).
        filters: a row that samples uses top-k, top-p or min-p.
        processed_logprobs: a row asks for logprobs after penalties, masks and filters.
        hidden: hidden states leave the forward, of last tokens or of more.
        hidden_layers: those of inner layers too; see `HiddenStateRequest.layers`.
        split: other rows decode meanwhile, so the layers had better run a few at a time.
    """

    mode: ForwardMode
    tokens: int
    live_tokens: int
    sequences: int
    max_length: int
    has_prefix: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    host_mask: bool = False
    filters: bool = False
    processed_logprobs: bool = False
    hidden: HiddenMode = HiddenMode.NONE
    hidden_layers: tuple[int, ...] = ()
    adapters: bool = False
    split: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The frozen key of one captured graph: padded tokens, padded sequences, variant."""

    tokens: int
    sequences: int
    variant: str = ""
