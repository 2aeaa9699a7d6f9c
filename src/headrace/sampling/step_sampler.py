"""The end of a step: the rows that sample get their tokens, and all rows advance."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput, SampleOutput
from headrace.batch.rows import Rows
from headrace.kernels.batch_preparation import advance_length, advance_token
from headrace.kernels.support_triton import has_dependent_launch, triton_available
from headrace.sampling.sampler import Sampler

if TYPE_CHECKING:
    from headrace.sampling.kernel_sampler import KernelSampler


class StepSampler:
    """Samples and advances by kernels where it can, else by torch.

    Args:
        rows: the columns. sampler: by torch. kernels: `None` where there are none.
    """

    def __init__(
        self, rows: Rows, sampler: Sampler, kernels: "KernelSampler | None" = None
    ) -> None:
        self.kernels = kernels
        self._rows, self._sampler = rows, sampler

    @classmethod
    def of(cls, rows: Rows, sampler: Sampler) -> "StepSampler":
        """With kernels on a GPU that has Triton."""
        device = rows.device
        if device.type != "cuda" or triton_available(device.type) is not None:
            return cls(rows, sampler)
        from headrace.sampling.kernel_sampler import KernelSampler  # needs Triton

        pdl = has_dependent_launch(device)
        return cls(rows, sampler, KernelSampler(rows, rows.num_rows, pdl=pdl))

    def sample(
        self, logits_output: LogitsProcessorOutput, batch: ForwardBatch
    ) -> SampleOutput | None:
        """Sample the rows that sample, then advance all rows; `None` when no row samples.

        A path that has done both already leaves only the logprobs to take.
        """
        info, kernels, logits = batch.sampling, self.kernels, logits_output.next_token_logits
        tokens, finite = logits_output.next_token_ids, logits_output.finite
        if tokens is not None and finite is not None and info is not None:
            assert kernels is not None, "a path that samples does so by kernels"
            logprobs = kernels.logprobs(logits, tokens, info.logprobs)
            return SampleOutput(next_token_ids=tokens, finite=finite, logprobs=logprobs)
        if kernels is not None and kernels.takes(info):
            return kernels.sample(logits, batch)
        return self._sample_by_torch(logits, batch)

    def _sample_by_torch(self, logits: Tensor, batch: ForwardBatch) -> SampleOutput | None:
        rows, info = self._rows, batch.sampling
        # The sampler still sees the rows as the forward did: lengths after the step come first.
        advance_length(batch.rows, _new_tokens(batch), rows.length, rows.active)
        if info is None:
            return None
        positions = rows.length[info.rows].long()
        output = self._sampler.sample(logits, info, rows, positions)
        advance_token(
            info.rows,
            output.next_token_ids,
            output.finite,
            last_token=rows.last_token,
            active=rows.active,
            stop_ids=rows.stop_ids,
            penalised=rows.penalised,
            token_counts=rows.token_counts,
        )
        return output


def _new_tokens(batch: ForwardBatch) -> Tensor:
    if batch.extend_lens is not None:
        return batch.extend_lens
    return torch.ones_like(batch.rows, dtype=torch.int32)
