"""Sampling and advance of a step in a few launches, by the kernels of the decode graph.

The torch sampler launches some thirty small kernels a step, and a short prompt waits for them. It
stays for what only it can do, and for devices without Triton; the tokens are the same.

Importing this file needs Triton.
"""

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import SampleOutput, TokenLogprobs
from headrace.batch.rows import Rows
from headrace.batch.sampling_batch_info import LogprobRequest, SamplingBatchInfo
from headrace.kernels.batch_preparation_triton import advance_decode, advance_lengths
from headrace.kernels.logprobs_triton import LogprobScratch, kernel_takes, token_logprobs
from headrace.kernels.one_storage import one_storage
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
        self._logprob_scratch = LogprobScratch.allocate(samples, rows.device)

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
        tokens, finite = one_storage(
            rows.device, (torch.int64, (samples,)), (torch.bool, (samples,))
        )
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
        logprobs = self.logprobs(logits, tokens, info.logprobs)
        return SampleOutput(next_token_ids=tokens, finite=finite, logprobs=logprobs)

    def logprobs(
        self, logits: Tensor, tokens: Tensor, request: LogprobRequest | None
    ) -> TokenLogprobs | None:
        """As `take_logprobs` of raw logits: in two launches, or by torch where a row asks for more
        than the kernels take (`kernel_takes`), since long lists are a matter of sorting.

        Args:
            logits: [S, V] float32. tokens: [S] int64.
            request: without `processed`, which only the torch sampler has.
        """
        if request is None:
            return None
        named = 0 if request.token_ids is None else request.token_ids.shape[1]
        if not kernel_takes(request.top, named, logits.shape[1]):
            return take_logprobs(logits, logits, tokens, request)
        assert request.processed is None, "processed logits are the torch sampler's"
        return TokenLogprobs.of(
            token_logprobs(
                logits,
                tokens,
                request.top,
                request.token_ids,
                index=request.index,
                scratch=self._logprob_scratch,
                pdl=self._pdl,
            )
        )
