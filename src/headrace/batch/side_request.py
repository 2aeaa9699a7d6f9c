"""What leaves a forward besides the logits of each sequence's last token."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobRequest:
    """Logprobs of prompt tokens computed in this step.

    Attributes:
        token_index: [M] int64, places among the T tokens whose logits are needed.
        targets: [M] int64, the prompt token that follows each.
        top: the largest n asked.
    """

    token_index: Tensor
    targets: Tensor
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStateRequest:
    """Hidden states of tokens computed in this step, after the last norm and before the head.

    Attributes:
        token_index: [M] int64, places among the T tokens whose states are wanted.
        layers: inner layers whose states are wanted of these tokens too, ascending: 0 is the
            embedding, i the stream behind i layers, before any norm.
        sums: (first, end) of runs of places whose states are wanted as one sum each.
    """

    token_index: Tensor | None = None
    layers: tuple[int, ...] = ()
    sums: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRequest:
    """Side outputs asked of one forward; the default asks for none.

    Attributes:
        routed_experts: [M] int64, places among the T tokens whose experts are wanted.
    """

    prompt_logprobs: PromptLogprobRequest | None = None
    hidden: HiddenStateRequest | None = None
    routed_experts: Tensor | None = None
