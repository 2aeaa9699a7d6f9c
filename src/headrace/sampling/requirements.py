"""What the sampling rows of a step require, worked out on the host before the launch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.batch.sampling_batch_info import LogprobRequest, SamplingBatchInfo, TokenMask
from headrace.batch.transfer import to_device
from headrace.request.sampling_params import SamplingParams


def sampling_batch_info(
    params: Sequence[SamplingParams],
    rows: Sequence[int],
    sequence_index: Sequence[int],
    token_index: Sequence[int],
    device: torch.device,
    masks: Sequence[Tensor | None] = (),
) -> SamplingBatchInfo:
    """Collect the needs of S sampling sequences; the arguments are in their order.

    Args:
        params: options of each.
        rows: row of each.
        sequence_index: place of each among the B sequences of the batch.
        token_index: place of each one's last new token among the T tokens of the step.
        masks: what the host allows each in this step, [W] int32 (`host_mask.allowed_line`), `None`
            for a sequence without a mask; empty when none has one.
    """
    places = torch.tensor([rows, sequence_index, token_index], dtype=torch.int64)  # one copy
    assert places.shape == (3, len(params))
    row, sequence, token = to_device(places, device).unbind(0)
    return SamplingBatchInfo(
        rows=row,
        sequence_index=sequence,
        token_index=token,
        all_greedy=all(each.greedy for each in params),
        any_penalties=any(each.has_penalties for each in params),
        any_bias=any(each.has_bias for each in params),
        any_filters=any(each.has_filters and not each.greedy for each in params),
        any_min_tokens=any(each.min_tokens > 0 for each in params),
        mask=_mask(masks, device),
        logprobs=_logprob_request(params, device),
    )


def wanted_logprobs(params: SamplingParams) -> int | None:
    """How many likeliest tokens are returned beside each output token; `None`: no logprobs."""
    if params.logprobs is None and params.logprob_token_ids:
        return 0
    return params.logprobs


def _mask(masks: Sequence[Tensor | None], device: torch.device) -> TokenMask | None:
    lines = [line for line in masks if line is not None]
    if not lines:
        return None
    places = tuple(place for place, line in enumerate(masks) if line is not None)
    return TokenMask(
        places=places,
        index=to_device(torch.tensor(places, dtype=torch.int64), device),
        bits=to_device(torch.stack(lines), device),
    )


def _logprob_request(
    params: Sequence[SamplingParams], device: torch.device
) -> LogprobRequest | None:
    wanted = {
        place: top for place, top in enumerate(map(wanted_logprobs, params)) if top is not None
    }
    if not wanted:
        return None
    asking = [params[place] for place in wanted]
    width = max(len(each.logprob_token_ids) for each in asking)
    token_ids = processed = None
    if width:
        padded = [
            [*each.logprob_token_ids, *[-1] * (width - len(each.logprob_token_ids))]
            for each in asking
        ]
        token_ids = to_device(torch.tensor(padded, dtype=torch.int64), device)
    if any(each.logprobs_mode == "processed" for each in asking):
        modes = [each.logprobs_mode == "processed" for each in asking]
        processed = to_device(torch.tensor(modes, dtype=torch.bool), device)
    return LogprobRequest(
        places=tuple(wanted),
        index=to_device(torch.tensor(list(wanted), dtype=torch.int64), device),
        top=max(wanted.values()),
        token_ids=token_ids,
        processed=processed,
    )
