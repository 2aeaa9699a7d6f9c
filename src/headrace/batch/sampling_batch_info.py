"""Which rows of a step sample, and what the sampler may skip for them.

The parameters themselves are columns of the rows on the device; only what the host must know to
leave work out, and what only the host can make (masks), travels here.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """Logprobs of the sampled tokens of a step, for the L sampling rows that ask.

    Attributes:
        places: their places among the S sampling rows, ascending.
        index: [L] int64, the same on the device.
        top: the largest n of the rows.
        token_ids: [L, M] int64, further ids of each row padded with -1; `None` when no row asks.
        processed: [L] bool, rows that want them after penalties, bias, mask and filters.
    """

    places: tuple[int, ...]
    index: Tensor
    top: int
    token_ids: Tensor | None = None
    processed: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """What the host allows in this step, for the M sampling rows that bring a mask.

    Attributes:
        places: their places among the S sampling rows, ascending.
        index: [M] int64, the same on the device.
        bits: [M, ceil(V / 32)] int32: bit t % 32 of word t // 32 says whether token t is allowed.
    """

    places: tuple[int, ...]
    index: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatchInfo:
    """Sampling of one step over S of its B sequences.

    Attributes:
        rows: [S] int64, rows that sample.
        sequence_index: [S] int64, their places among the B sequences of the batch.
        token_index: [S] int64, places of their last new tokens among the T tokens of the step.
        all_greedy: every row has temperature 0.
        any_penalties, any_bias, any_filters, any_min_tokens: some row uses the feature.
        mask: what the host allows, `None` when no row brings a mask.
        logprobs: what to return, `None` when no row asks.
    """

    rows: Tensor
    sequence_index: Tensor
    token_index: Tensor
    all_greedy: bool
    any_penalties: bool = False
    any_bias: bool = False
    any_filters: bool = False
    any_min_tokens: bool = False
    mask: TokenMask | None = None
    logprobs: LogprobRequest | None = None
