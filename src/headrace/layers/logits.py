"""From hidden states to what a step was asked for: logits, prompt logprobs, states themselves."""

from typing import Protocol

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import HiddenStates, LogitsProcessorOutput, TokenLogprobs
from headrace.batch.side_request import HiddenStateRequest, PromptLogprobRequest
from headrace.config.persona import ModelTraits
from headrace.kernels.logprobs import token_logprobs

SLICE_BYTES = 64 * 2**20
"""Memory for the float32 logits of prompt tokens at one time: a prompt of 8,000 tokens over a
vocabulary of 128,000 would need 4 GiB at once."""
STATE_UNIT = 2.0**-32
"""What states are rounded to before they are summed: finer than float32 tells numbers above 1/256,
and 8,000 states of up to 256 still add up exactly."""


class HasHead(Protocol):
    """A model that computes logits."""

    traits: ModelTraits

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V] float32"""
        ...


def process_logits(model: HasHead, hidden: Tensor, batch: ForwardBatch) -> LogitsProcessorOutput:
    """Logits of the rows that sample, and what else of the states `batch.side` asks for.

    Args:
        hidden: [T, H], after the last norm.

    Returns: logits [S, V] float32 in the order of `batch.sampling`, [0, V] without one (a step of
        prompt chunks that end no prompt): the head is read only when somebody samples.
    """
    info = batch.sampling
    logits = model.compute_logits(
        hidden[:0] if info is None else hidden.index_select(0, info.token_index)
    )
    request, states = batch.side.prompt_logprobs, batch.side.hidden
    return LogitsProcessorOutput(
        next_token_logits=logits,
        prompt_logprobs=None if request is None else _prompt_logprobs(model, hidden, request),
        hidden=None if states is None else hidden_states(hidden, states, batch.asked_states),
    )


def hidden_states(
    hidden: Tensor, request: HiddenStateRequest, asked: Tensor | None
) -> HiddenStates:
    """Copies: a path may overwrite `hidden` in its next step, before the host has read them.

    Args:
        hidden: [T, H], after the last norm. asked: [M, L, H] with the states of the inner layers
            that are asked; `None` where none is.
    """
    sums = [exact_sum(hidden[first:end]) for first, end in request.sums]
    tokens = None
    if request.token_index is not None:
        last = hidden.index_select(0, request.token_index)
        tokens = last.unsqueeze(1)
        if asked is not None:
            asked[:, -1] = last
            tokens = asked
    return HiddenStates(tokens=tokens, sums=torch.stack(sums) if sums else None)


def exact_sum(states: Tensor) -> Tensor:
    """[n, H] -> [H] float64, the same bits however a prompt is cut into parts that are added up.

    Whole multiples of `STATE_UNIT` add up exactly as long as the sum stays below 2^21.
    """
    return (states.double() / STATE_UNIT).round_().sum(0).mul_(STATE_UNIT)


def _prompt_logprobs(
    model: HasHead, hidden: Tensor, request: PromptLogprobRequest
) -> TokenLogprobs:
    rows = max(1, SLICE_BYTES // (4 * model.traits.vocab_size))
    parts = [
        token_logprobs(model.compute_logits(hidden.index_select(0, index)), targets, request.top)
        for index, targets in zip(
            torch.split(request.token_index, rows), torch.split(request.targets, rows), strict=True
        )
    ]
    return TokenLogprobs(
        chosen=torch.cat([part[0] for part in parts]),
        rank=torch.cat([part[1] for part in parts]),
        top_values=torch.cat([part[2] for part in parts]),
        top_ids=torch.cat([part[3] for part in parts]),
    )
