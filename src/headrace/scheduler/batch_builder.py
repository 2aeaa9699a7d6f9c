"""From shares to a `ForwardBatch`."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.rows import RowStart
from headrace.batch.sampling_batch_info import SamplingBatchInfo
from headrace.batch.side_request import PromptLogprobRequest, SideRequest
from headrace.batch.transfer import to_device
from headrace.sampling.host_mask import allowed_line
from headrace.sampling.requirements import sampling_batch_info
from headrace.scheduler.chooser import Share
from headrace.scheduler.pooling import NO_STATES, wanted_states
from headrace.scheduler.row_spans import wanted_rows
from headrace.scheduler.sequence import Sequence
from headrace.scheduler.step_work import PromptSpan, StepWork


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


class BatchBuilder:
    """Makes the batch of each step.

    What a pure decode step sends to the device, its rows and what its sampler may skip, stays the
    same while the same sequences run; it is kept and used again, so that steady decode sends
    nothing.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._kept_for: list[Sequence] = []
        self._kept: tuple[Tensor, SamplingBatchInfo] | None = None
        self._places: dict[str, tuple[list[int], Tensor]] = {}

    def build(self, shares: list[Share], *, split: bool = False) -> tuple[ForwardBatch, StepWork]:
        """The batch of a step, and what it will bring to whom.

        Args:
            split: other rows decode while it runs.
        """
        mode = _mode(shares)
        work, side = self._work(mode, shares)
        rows, info = self._rows_and_sampling(mode, shares, work.sampling)
        bounds = HostBounds(
            rows=[_row(share) for share in shares],
            seq_lens=[share.sequence.length_bound + share.new_tokens for share in shares],
            extend_lens=[share.new_tokens for share in shares],
        )
        batch = ForwardBatch(
            mode=mode,
            rows=rows,
            bounds=bounds,
            facts=_facts(mode, work, bounds, info, split=split),
            prompt_tokens=None if mode.is_decode else self._send(_prompt_tokens(shares)),
            sampling=info,
            side=side,
            names=lambda: [share.sequence.name for share in shares],
        )
        return batch, work

    def _work(self, mode: ForwardMode, shares: list[Share]) -> tuple[StepWork, SideRequest]:
        """What the step brings to whom, and what must leave the forward for it."""
        # A decode step has no prompt to score, and none to embed.
        spans, scored = _scored_prompts(() if mode.is_decode else shares, self._send)
        parts, states = NO_STATES, None
        if not mode.is_decode or any(share.sequence.state_rows is not None for share in shares):
            parts, states = wanted_states(shares, partial(self._send_places, "states"))
        routing, places = wanted_rows(shares, lambda sequence: sequence.routing_rows)
        work = StepWork(
            shares=shares,
            sampling=[share for share in shares if share.samples],
            prompt_spans=spans,
            state_parts=parts,
            routing=routing,
        )
        routed = self._send_places("routing", places) if places else None
        return work, SideRequest(prompt_logprobs=scored, hidden=states, routed_experts=routed)

    def _rows_and_sampling(
        self, mode: ForwardMode, shares: Seq[Share], sampling: Seq[Share]
    ) -> tuple[Tensor, SamplingBatchInfo | None]:
        sequences = [share.sequence for share in shares]
        if mode.is_decode and self._kept is not None and sequences == self._kept_for:
            return self._kept
        info = self._sampling(shares) if sampling else None
        if info is not None and len(sampling) == len(shares):
            rows = info.rows  # the same, sent already
        else:
            rows = self._send([_row(share) for share in shares])
        self._kept_for, self._kept = [], None
        if mode.is_decode and info is not None and info.mask is None:
            self._kept_for, self._kept = sequences, (rows, info)
        return rows, info

    def forget(self) -> None:
        """A sequence has moved to another row: what was kept may name its old one."""
        self._kept_for, self._kept = [], None

    def _sampling(self, shares: Seq[Share]) -> SamplingBatchInfo:
        ends = list(accumulate(share.new_tokens for share in shares))
        places = [place for place, share in enumerate(shares) if share.samples]
        sequences = [shares[place].sequence for place in places]
        return sampling_batch_info(
            [sequence.request.params for sequence in sequences],
            [_row(shares[place]) for place in places],
            places,
            [ends[place] - 1 for place in places],
            self._device,
            [self._allowed(sequence) for sequence in sequences],
        )

    def _allowed(self, sequence: Sequence) -> Tensor | None:
        mask = sequence.host_mask
        if mask is None:
            return None
        return allowed_line(mask, sequence.output_ids, self._vocab_size)

    def _send_places(self, use: str, places: list[int]) -> Tensor:
        """Those of steady decode stay the same, and are sent once for each use."""
        kept = self._places.get(use)
        if kept is None or kept[0] != places:
            self._places[use] = kept = places, self._send(places)
        return kept[1]

    def _send(self, values: list[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)


def _mode(shares: Seq[Share]) -> ForwardMode:
    decodes = [share.from_row for share in shares]
    if all(decodes):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(decodes) else ForwardMode.EXTEND


def _facts(
    mode: ForwardMode,
    work: StepWork,
    bounds: HostBounds,
    info: SamplingBatchInfo | None,
    *,
    split: bool,
) -> BatchFacts:
    tokens = sum(bounds.extend_lens)
    params = [share.sequence.request.params for share in work.sampling]
    return BatchFacts(
        mode=mode,
        tokens=tokens,
        live_tokens=tokens,
        sequences=len(work.shares),
        max_length=max(bounds.seq_lens),
        has_prefix=any(share.sequence.length_bound for share in work.shares),
        logprobs=info is not None and info.logprobs is not None,
        prompt_logprobs=bool(work.prompt_spans),
        host_mask=info is not None and info.mask is not None,
        filters=info is not None and info.any_filters,
        processed_logprobs=any(each.logprobs_mode == "processed" for each in params),
        hidden=work.state_parts.mode,
        hidden_layers=work.state_parts.layers,
        split=split,
    )


def _prompt_tokens(shares: Seq[Share]) -> list[int]:
    tokens: list[int] = []
    for share in shares:
        start = share.sequence.length_bound
        known = share.sequence.tokens[start : start + share.new_tokens]
        tokens += [-1] if share.from_row else known
    return tokens


def _scored_prompts(
    shares: Seq[Share], send: Callable[[list[int]], Tensor]
) -> tuple[list[PromptSpan], PromptLogprobRequest | None]:
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
    if not spans:
        return spans, None
    return spans, PromptLogprobRequest(
        token_index=send(token_index), targets=send(targets), top=top
    )


def _row(share: Share) -> int:
    assert share.sequence.row is not None, "a scheduled sequence has a row"
    return share.sequence.row
