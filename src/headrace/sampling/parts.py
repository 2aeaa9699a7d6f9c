"""Some of the sampling rows of a step, and the outputs of all of them put together."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.batch.outputs import SampleOutput, TokenLogprobs
from headrace.batch.sampling_batch_info import LogprobRequest, SamplingBatchInfo, TokenMask


def part_of_info(info: SamplingBatchInfo, at: slice) -> SamplingBatchInfo:
    """The info of the sampling rows `at`; flags and top n stay those of the whole."""
    return replace(
        info,
        rows=info.rows[at],
        sequence_index=info.sequence_index[at],
        token_index=info.token_index[at],
        mask=_part_of_mask(info.mask, at),
        logprobs=_part_of_request(info.logprobs, at),
    )


def join_outputs(parts: Sequence[SampleOutput]) -> SampleOutput:
    """The outputs of consecutive parts of a step's rows as one."""
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return SampleOutput(
        next_token_ids=torch.cat([part.next_token_ids for part in parts]),
        finite=torch.cat([part.finite for part in parts]),
        logprobs=_join_logprobs(logprobs) if logprobs else None,
    )


def _join_logprobs(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    extra = [part.extra for part in parts if part.extra is not None]
    extra_rank = [part.extra_rank for part in parts if part.extra_rank is not None]
    return TokenLogprobs(
        chosen=torch.cat([part.chosen for part in parts]),
        rank=torch.cat([part.rank for part in parts]),
        top_values=torch.cat([part.top_values for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        extra=torch.cat(extra) if extra else None,
        extra_rank=torch.cat(extra_rank) if extra_rank else None,
    )


def _part_of_mask(mask: TokenMask | None, at: slice) -> TokenMask | None:
    if mask is None:
        return None
    own = _own(mask.places, at)
    if own.start == own.stop:
        return None
    return TokenMask(
        places=tuple(place - at.start for place in mask.places[own]),
        index=mask.index[own] - at.start,
        bits=mask.bits[own],
    )


def _part_of_request(request: LogprobRequest | None, at: slice) -> LogprobRequest | None:
    if request is None:
        return None
    own = _own(request.places, at)
    if own.start == own.stop:
        return None
    return replace(
        request,
        places=tuple(place - at.start for place in request.places[own]),
        index=request.index[own] - at.start,
        token_ids=_part(request.token_ids, own),
        processed=_part(request.processed, own),
    )


def _own(places: Sequence[int], at: slice) -> slice:
    """Which of the ascending `places` lie in `at`."""
    return slice(bisect_left(places, at.start), bisect_left(places, at.stop))


def _part(tensor: Tensor | None, at: slice) -> Tensor | None:
    return None if tensor is None else tensor[at]
