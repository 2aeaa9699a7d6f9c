"""The rows: one place per scheduled sequence, columns on the device.

A sequence keeps its row from scheduling to its end or retraction; a batch is a gather from rows.
Rows are admitted through `admit`; from then on only the kernels of the forward stream write them.
Row 0 is the padding row: never live, length 0. (The idea of permanent rows: vLLM model runner v2.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.batch.transfer import to_device
from headrace.request.sampling_params import MAX_STOP_IDS, SamplingParams

MAX_ROW_STOP_IDS = 2 * MAX_STOP_IDS  # the request's own and the model's end tokens

IN_PROMPT = 1 << 30  # bit of `token_counts`: the token occurs in the prompt

Allocate = Callable[[str, Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStart:
    """State of a sequence when it takes a row.

    Attributes:
        length: tokens whose KV is in the pool already (the cached prefix).
        tokens: prompt and, after a retraction, the output made before it.
        prompt_length: how many of `tokens` are the prompt.
        seed: settled 64-bit seed of the sequence.
        stop_ids: ids that end the sequence.
    """

    row: int
    length: int
    tokens: Sequence[int]
    prompt_length: int
    seed: int
    params: SamplingParams
    stop_ids: Sequence[int]


class Rows:
    """Device columns, [R] unless said; R = num_rows, V = vocab_size.

    Columns:
        last_token int64, length int32 (tokens with KV), active bool, seed int64,
        temperature, top_p, min_p, presence, frequency, repetition float32, top_k int32 (0: off),
        min_length int32 (stop ids are masked below it), stop_ids int64 [R, MAX_ROW_STOP_IDS] (-1),
        penalised, biased bool; token_counts int32 [R, V] (output count, bit IN_PROMPT),
        bias float32 [R, V]. The last two are meaningful only where penalised / biased.
    """

    def __init__(self, num_rows: int, vocab_size: int, allocate: Allocate) -> None:
        """`allocate(tag, shape, dtype)` gives zeroed memory on the device."""

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return allocate("rows", (num_rows, *shape), dtype)

        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.last_token = column(torch.int64)
        self.length = column(torch.int32)
        self.active = column(torch.bool)
        self.seed = column(torch.int64)
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float32)
        self.top_k = column(torch.int32)
        self.min_p = column(torch.float32)
        self.presence = column(torch.float32)
        self.frequency = column(torch.float32)
        self.repetition = column(torch.float32)
        self.min_length = column(torch.int32)
        self.stop_ids = column(torch.int64, MAX_ROW_STOP_IDS)
        self.penalised = column(torch.bool)
        self.biased = column(torch.bool)
        self.token_counts = column(torch.int32, vocab_size)
        self.bias = column(torch.float32, vocab_size)

    @property
    def device(self) -> torch.device:
        return self.length.device

    def admit(self, starts: Sequence[RowStart]) -> None:
        """Write the columns of newly scheduled sequences, one copy per number type."""
        if not starts:
            return
        integers = [_integers(start) for start in starts]
        floats = [_floats(start.params) for start in starts]
        whole = to_device(torch.tensor(integers, dtype=torch.int64), self.device)
        real = to_device(torch.tensor(floats, dtype=torch.float32), self.device)
        rows = whole[:, 0]
        for index, column in enumerate(
            (self.length, self.seed, self.top_k, self.min_length, self.penalised, self.biased)
        ):
            column[rows] = whole[:, index + 1].to(column.dtype)
        self.active.index_fill_(0, rows, True)  # assigning a number would make the host wait
        self.stop_ids[rows] = whole[:, 7:]
        for index, column in enumerate(
            (
                self.temperature,
                self.top_p,
                self.min_p,
                self.presence,
                self.frequency,
                self.repetition,
            )
        ):
            column[rows] = real[:, index]
        for start in starts:
            self._admit_vocabulary_columns(start)

    def _admit_vocabulary_columns(self, start: RowStart) -> None:
        params = start.params
        if params.has_penalties:
            tokens = to_device(torch.tensor(list(start.tokens), dtype=torch.int64), self.device)
            prompt, output = tokens[: start.prompt_length], tokens[start.prompt_length :]
            counts = self.token_counts[start.row]
            counts.zero_()
            counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            counts[prompt] |= IN_PROMPT
        if params.has_bias:
            bias = self.bias[start.row]
            bias.zero_()
            if params.allowed_token_ids is not None:
                allowed = torch.tensor(list(params.allowed_token_ids), dtype=torch.int64)
                bias.fill_(float("-inf"))
                bias.index_fill_(0, to_device(allowed, self.device), 0.0)
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
                values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
                bias[to_device(ids, self.device)] += to_device(values, self.device)


def _integers(start: RowStart) -> list[int]:
    stop_ids = list(start.stop_ids)
    assert len(stop_ids) <= MAX_ROW_STOP_IDS, "admission bounds the stop ids"
    params = start.params
    return [
        start.row,
        start.length,
        start.seed,
        max(params.top_k, 0),
        # The grammar of a structured answer minds min_tokens: where only an end is left it ends.
        start.prompt_length + (0 if params.structured else params.min_tokens),
        int(params.has_penalties),
        int(params.has_bias),
        *stop_ids,
        *[-1] * (MAX_ROW_STOP_IDS - len(stop_ids)),
    ]


def _floats(params: SamplingParams) -> list[float]:
    return [
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    ]
