"""From shares to a `ForwardBatch`, and the record that is kept until its results are processed."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.rows import RowStart
from headrace.batch.sampling_batch_info import SamplingBatchInfo
from headrace.batch.side_request import PromptLogprobRequest, SideRequest
from headrace.runner.worker import StepResult
from headrace.sampling.requirements import sampling_batch_info
from headrace.scheduler.chooser import Share
from headrace.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Prompt logprobs that a step brings: those of tokens [first, first + count) of a prompt."""

    sequence: Sequence
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step in flight. `sampling` are the shares that sample, in the order of the results."""

    shares: list[Share]
    sampling: list[Share]
    prompt_spans: list[PromptSpan]
    result: StepResult


def row_start(sequence: Sequence) -> RowStart:
    """The columns of a sequence that has just taken its row."""
    assert sequence.row is not None, "an admitted sequence has a row"
    return RowStart(
        row=sequence.row,
        length=sequence.length_bound,
        tokens=sequence.tokens,
        prompt_length=sequence.prompt_length,
        seed=sequence.seed,
        params=sequence.request.params,
        stop_ids=sorted(sequence.stop_ids),
    )


def build_batch(
    shares: Seq[Share], device: torch.device, vocab_size: int
) -> tuple[ForwardBatch, list[Share], list[PromptSpan]]:
    """The batch of a step, the shares that sample, and the prompt logprobs it will bring."""
    mode = _mode(shares)
    prompt_tokens = None if mode.is_decode else _prompt_tokens(shares)
    spans, token_index, targets, top = _prompt_logprobs(shares)
    sampling = [share for share in shares if share.samples]
    side = SideRequest()
    if spans:
        side = SideRequest(
            prompt_logprobs=PromptLogprobRequest(
                token_index=_to_device(token_index, device),
                targets=_to_device(targets, device),
                top=top,
            )
        )
    extend_lens = [share.new_tokens for share in shares]
    seq_lens = [share.sequence.length_bound + share.new_tokens for share in shares]
    batch = ForwardBatch(
        mode=mode,
        rows=_to_device([_row(share) for share in shares], device),
        bounds=HostBounds(seq_lens=seq_lens, extend_lens=extend_lens),
        facts=BatchFacts(
            mode=mode,
            tokens=sum(extend_lens),
            live_tokens=sum(extend_lens),
            sequences=len(shares),
            max_length=max(seq_lens),
            has_prefix=any(share.sequence.length_bound for share in shares),
            logprobs=any(share.sequence.request.params.logprobs is not None for share in sampling),
            prompt_logprobs=bool(spans),
            host_mask=any(share.sequence.host_mask is not None for share in sampling),
        ),
        prompt_tokens=None if prompt_tokens is None else _to_device(prompt_tokens, device),
        sampling=_sampling(shares, device, vocab_size) if sampling else None,
        side=side,
    )
    return batch, sampling, spans


def _mode(shares: Seq[Share]) -> ForwardMode:
    decodes = [share.from_row for share in shares]
    if all(decodes):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(decodes) else ForwardMode.EXTEND


def _prompt_tokens(shares: Seq[Share]) -> list[int]:
    tokens: list[int] = []
    for share in shares:
        start = share.sequence.length_bound
        known = share.sequence.tokens[start : start + share.new_tokens]
        tokens += [-1] if share.from_row else known
    return tokens


def _prompt_logprobs(
    shares: Seq[Share],
) -> tuple[list[PromptSpan], list[int], list[int], int]:
    """The logits of the token at position p score the prompt token p + 1."""
    spans: list[PromptSpan] = []
    token_index: list[int] = []
    targets: list[int] = []
    top = 0
    offset = 0
    for share in shares:
        sequence, start = share.sequence, share.sequence.length_bound
        stop = min(start + share.new_tokens, sequence.prompt_length - 1)
        if sequence.wants_prompt_logprobs and start < stop:
            spans.append(PromptSpan(sequence=sequence, first=start + 1, count=stop - start))
            token_index += range(offset, offset + stop - start)
            targets += sequence.tokens[start + 1 : stop + 1]
            top = max(top, sequence.request.params.prompt_logprobs or 0)
        offset += share.new_tokens
    return spans, token_index, targets, top


def _sampling(shares: Seq[Share], device: torch.device, vocab_size: int) -> SamplingBatchInfo:
    ends = list(accumulate(share.new_tokens for share in shares))
    places = [place for place, share in enumerate(shares) if share.samples]
    sequences = [shares[place].sequence for place in places]
    return sampling_batch_info(
        [sequence.request.params for sequence in sequences],
        [_row(shares[place]) for place in places],
        places,
        [ends[place] - 1 for place in places],
        device,
        [
            None
            if sequence.host_mask is None
            else sequence.host_mask.forbidden(sequence.output_ids)
            for sequence in sequences
        ],
        vocab_size=vocab_size,
    )


def _row(share: Share) -> int:
    assert share.sequence.row is not None, "a scheduled sequence has a row"
    return share.sequence.row


def _to_device(values: list[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
