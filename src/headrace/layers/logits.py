"""From hidden states to the logits and prompt logprobs a step was asked for."""

from typing import Protocol

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput, TokenLogprobs
from headrace.batch.side_request import PromptLogprobRequest
from headrace.config.persona import ModelTraits
from headrace.kernels.logprobs import token_logprobs

SLICE_BYTES = 64 * 2**20
"""Memory for the float32 logits of prompt tokens at one time: a prompt of 8,000 tokens over a
vocabulary of 128,000 would need 4 GiB at once."""


class HasHead(Protocol):
    """A model that computes logits."""

    traits: ModelTraits

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V] float32"""
        ...


def process_logits(model: HasHead, hidden: Tensor, batch: ForwardBatch) -> LogitsProcessorOutput:
    """Logits of the rows that sample, and logprobs of the prompt tokens asked for.

    Args:
        hidden: [T, H], after the last norm.

    Returns: logits [S, V] float32 in the order of `batch.sampling`; without one (warm-up, idle) a
        row for every sequence, so that the head runs there too.
    """
    logits = model.compute_logits(hidden.index_select(0, _sampling_tokens(batch, hidden)))
    request = batch.side.prompt_logprobs
    return LogitsProcessorOutput(
        next_token_logits=logits,
        prompt_logprobs=None if request is None else _prompt_logprobs(model, hidden, request),
    )


def _sampling_tokens(batch: ForwardBatch, hidden: Tensor) -> Tensor:
    """[S] int64, places among the T tokens whose logits choose the next token."""
    chosen = None if batch.sampling is None else batch.sampling.sequence_index
    if batch.extend_start is None or batch.extend_lens is None:  # one token a sequence
        if chosen is not None:
            return chosen
        return torch.arange(batch.num_sequences, device=hidden.device)
    last = (batch.extend_start + batch.extend_lens - 1).to(torch.int64)  # [B]
    return last if chosen is None else last.index_select(0, chosen)


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
