"""Sampling and advance of a step in a few launches, by the kernels of the decode graph.

The torch sampler launches some thirty small kernels a step, and a short prompt waits for them. It
stays for what only it can do, and for devices without Triton; the tokens are the same.

Importing this file needs Triton.
"""

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import SampleOutput
from headrace.batch.rows import Rows
from headrace.batch.sampling_batch_info import SamplingBatchInfo
from headrace.kernels.batch_preparation_triton import advance_decode, advance_lengths
from headrace.kernels.sampling_triton import (
    MAX_VOCABULARY,
    SamplingColumns,
    SamplingScratch,
    sample_tokens,
)
from headrace.sampling.sampler import take_logprobs


class KernelSampler:
    """Samples the rows that sample and advances all rows of a step that went eagerly.

    Args:
        rows: the columns.
        samples: the most rows that sample in a step.
        pdl: programmatic dependent launch.
    """

    def __init__(self, rows: Rows, samples: int, *, pdl: bool) -> None:
        self._rows, self._pdl = rows, pdl
        self._columns = SamplingColumns.of(rows)
        self._scratch = SamplingScratch.allocate(samples, rows.device)

    def takes(self, info: SamplingBatchInfo | None) -> bool:
        """Whether no row has a mask of the host, or wants what only the torch sampler keeps."""
        if info is None:
            return True
        if self._columns.bias.shape[1] > MAX_VOCABULARY:
            return False
        processed = info.logprobs is not None and info.logprobs.processed is not None
        return info.mask is None and not processed

    def sample(self, logits: Tensor, batch: ForwardBatch) -> SampleOutput | None:
        """As `Sampler.sample` with the advance behind it; `None` when no row samples.

        Args:
            logits: [S, V] float32, not written.
            batch: prepared; `takes` its sampling.
        """
        rows, info = self._rows, batch.sampling
        advance_lengths(
            batch.rows, batch.extend_lens, length=rows.length, active=rows.active, pdl=self._pdl
        )
        if info is None:
            return None
        samples = info.rows.shape[0]
        tokens = torch.empty(samples, dtype=torch.int64, device=rows.device)
        finite = torch.empty(samples, dtype=torch.bool, device=rows.device)
        sample_tokens(
            logits,
            info.rows,
            batch.seq_lens[info.sequence_index],  # after the step
            self._columns,
            tokens=tokens,
            finite=finite,
            scratch=self._scratch,
            filters=info.any_filters,
            pdl=self._pdl,
        )
        advance_decode(
            info.rows,
            tokens,
            finite,
            length=None,
            last_token=rows.last_token,
            active=rows.active,
            stop_ids=rows.stop_ids,
            penalised=rows.penalised,
            token_counts=rows.token_counts,
            pdl=self._pdl,
        )
        logprobs = take_logprobs(logits, logits, tokens, info.logprobs)
        return SampleOutput(next_token_ids=tokens, finite=finite, logprobs=logprobs)
