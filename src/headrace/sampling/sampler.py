"""From the logits of a step to its tokens.

One order on the logits for every row and path: penalties, bias, masks, temperature, top-k, top-p,
min-p; then the arg-max of logits plus noise. What no row asks for is not computed. Nothing here
mixes rows: a row's token and logprobs depend, bit for bit, on its own logits, parameters, seed and
position. Sums over the vocabulary are of whole numbers for that reason (`kernels.mass`).
"""

import torch
from torch import Tensor

from headrace.batch.outputs import SampleOutput, TokenLogprobs
from headrace.batch.rows import Rows
from headrace.batch.sampling_batch_info import LogprobRequest, SamplingBatchInfo
from headrace.kernels.filters import filter_logits
from headrace.kernels.logprobs import token_logprobs
from headrace.kernels.noise import gumbel_noise
from headrace.kernels.row_selection import RowIndex, change_rows, rows_at_a_time
from headrace.sampling.logit_changes import add_bias, forbid, forbid_stops, penalise
from headrace.sampling.parts import join_outputs, part_of_info


class Sampler:
    """Chooses tokens. It keeps no state: the randomness is a function of seed and position."""

    def sample(
        self, logits: Tensor, info: SamplingBatchInfo, rows: Rows, positions: Tensor
    ) -> SampleOutput:
        """One token for each sampling row.

        A live row is failed (`finite` False, token 0) when its logits hold NaN or +inf or when
        nothing is left to choose from; the other rows never notice.

        Many rows are taken a few at a time (the CPU's cache likes that, and scratch stays small);
        since rows are independent nothing else changes.

        Args:
            logits: [S, V] float32, not written.
            positions: [S] int64, index in its sequence of the token being sampled: the number of
                tokens before it.
        """
        step = rows_at_a_time(logits)
        if len(logits) <= step:
            return _sample(logits, info, rows, positions)
        parts = [slice(start, start + step) for start in range(0, len(logits), step)]
        return join_outputs(
            [_sample(logits[at], part_of_info(info, at), rows, positions[at]) for at in parts]
        )


def _sample(logits: Tensor, info: SamplingBatchInfo, rows: Rows, positions: Tensor) -> SampleOutput:
    index = info.rows
    allowed = _changed(logits, info, rows, positions)  # [S, V]
    peak = allowed.amax(-1)
    healthy = peak.isfinite() & (logits.amax(-1) < float("inf"))
    if info.all_greedy:
        processed = scores = allowed
    else:
        random = (rows.temperature[index] > 0) & healthy
        processed = _warped(allowed, peak, random, info, rows)
        scores = _noisy(allowed, processed, random, info, rows, positions)
    tokens = torch.where(healthy, scores.argmax(-1), 0)
    return SampleOutput(
        next_token_ids=tokens,
        finite=healthy | ~rows.active[index],
        logprobs=take_logprobs(logits, processed, tokens, info.logprobs),
    )


def _changed(logits: Tensor, info: SamplingBatchInfo, rows: Rows, positions: Tensor) -> Tensor:
    if info.any_penalties:
        logits = penalise(logits, rows, info.rows)
    if info.any_bias:
        logits = add_bias(logits, rows, info.rows)
    if info.mask is not None:
        logits = forbid(logits, info.mask)
    if info.any_min_tokens:
        logits = forbid_stops(logits, rows, info.rows, positions)
    return logits


def _warped(
    logits: Tensor, peak: Tensor, random: Tensor, info: SamplingBatchInfo, rows: Rows
) -> Tensor:
    """Logits of the `random` rows after temperature and filters, the others as they were."""

    def change(part: Tensor, selected: RowIndex) -> Tensor:
        row = info.rows[selected]
        # The peak is taken off first, so that a temperature near 0 cannot overflow.
        part = (part - peak[selected, None]).div_(rows.temperature[row, None])
        if info.any_filters:
            part = filter_logits(part, rows.top_k[row], rows.top_p[row], rows.min_p[row])
        return part

    return change_rows(logits, random, change)


def _noisy(
    logits: Tensor,
    processed: Tensor,
    random: Tensor,
    info: SamplingBatchInfo,
    rows: Rows,
    positions: Tensor,
) -> Tensor:
    """Logits of the `random` rows plus temperature times noise, -inf where they were filtered.

    The arg-max is that of logits / temperature + noise; but nothing here needs the row's peak, so
    a kernel can do it in one pass and come to the same bits.
    """

    def change(part: Tensor, selected: RowIndex) -> Tensor:
        row = info.rows[selected]
        noise = gumbel_noise(rows.seed[row], positions[selected], part.shape[-1])
        scores = noise.mul_(rows.temperature[row, None]).add_(part)
        if info.any_filters:
            scores.masked_fill_(processed[selected] == float("-inf"), float("-inf"))
        return scores

    return change_rows(logits, random, change)


def take_logprobs(
    raw: Tensor, processed: Tensor, tokens: Tensor, request: LogprobRequest | None
) -> TokenLogprobs | None:
    """Logprobs of the rows that ask, by torch; the other rows cost nothing.

    Args:
        raw, processed: [S, V] float32.
        tokens: [S] int64.
    """
    if request is None:
        return None
    if len(request.places) < len(tokens):
        tokens, source = tokens[request.index], raw[request.index]
    else:
        source = raw
    if request.processed is not None:
        changed = processed if source is raw else processed[request.index]
        source = torch.where(request.processed[:, None], changed, source)
    return TokenLogprobs.of(token_logprobs(source, tokens, request.top, request.token_ids))
