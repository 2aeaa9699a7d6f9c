"""What comes out of a forward and of sampling. Shapes: S sampling rows, V vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from headrace.base.decision import Refusal
from headrace.batch.facts import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of S chosen tokens, on the device.

    Attributes:
        chosen: [S] float32; rank: [S] int64, 1 is the likeliest.
        top_values, top_ids: [S, n] float32 and int64, largest first, ties by lowest id.
        extra: [S, M] float32, logprobs of ids asked by name, `None` when none were.
        extra_rank: [S, M] int64.
    """

    chosen: Tensor
    rank: Tensor
    top_values: Tensor
    top_ids: Tensor
    extra: Tensor | None = None
    extra_rank: Tensor | None = None

    @classmethod
    def of(
        cls, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    ) -> "TokenLogprobs":
        """The tensors in the order of the fields, as `token_logprobs` returns them."""
        chosen, rank, top_values, top_ids, extra, extra_rank = tensors
        return cls(
            chosen=chosen,
            rank=rank,
            top_values=top_values,
            top_ids=top_ids,
            extra=extra,
            extra_rank=extra_rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """What a `HiddenStateRequest` asked for, in its order; memory of its own.

    Attributes:
        tokens: [M, L, H] in the model's dtype, `None` when no single states were asked. The inner
            layers in the order of the request, last the state after the last norm.
        sums: [number of sums, H] float64, so that how a prompt is cut into chunks does not show in
            the float32 of its mean; `None` when none were asked.
    """

    tokens: Tensor | None = None
    sums: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class LogitsProcessorOutput:
    """Logits of a step.

    Attributes:
        next_token_logits: [S, V] float32, one row per sampling sequence; may be changed by the
            sampler.
        next_token_ids, finite: [S] int64 and bool when the path has sampled and advanced the rows
            already (a decode graph).
        prompt_logprobs: of the prompt tokens asked for, in the order of the request.
        hidden: the states asked for, `None` when none were.
    """

    next_token_logits: Tensor
    next_token_ids: Tensor | None = None
    finite: Tensor | None = None
    prompt_logprobs: TokenLogprobs | None = None
    hidden: HiddenStates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PPProxyTensors:
    """What one pipeline stage hands to the next: name -> [T, H]."""

    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One forward's result, with the path and bucket it took and why better ones were refused.

    `evidence`: what observers left on the device, by name.
    """

    logits_output: LogitsProcessorOutput
    path: str
    bucket: Bucket
    refused: tuple[Refusal, ...] = ()
    evidence: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """Sampled tokens, on the device.

    Attributes:
        next_token_ids: [S] int64.
        finite: [S] bool, False where a live row's logits held NaN or +inf; such a row has failed.
        logprobs: of the rows that asked, in their order; `None` when no row asked.
    """

    next_token_ids: Tensor
    finite: Tensor
    logprobs: TokenLogprobs | None = None
