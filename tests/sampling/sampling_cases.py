"""Rows, parameters and logits put together for tests of the sampler."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from headrace.batch.outputs import SampleOutput
from headrace.batch.rows import Rows, RowStart
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.host_mask import mask_words, set_bits
from headrace.sampling.requirements import sampling_batch_info
from headrace.sampling.sampler import Sampler

CPU = torch.device("cpu")
NUM_ROWS = 40


@dataclass(kw_only=True)
class Case:
    """One sampling sequence: its options, tokens so far, seed and logits [V]."""

    params: SamplingParams
    logits: torch.Tensor
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    seed: int = 0
    stop_ids: Sequence[int] = ()
    forbidden: Collection[int] | None = None
    row: int | None = None
    live: bool = field(default=True)


def sample(*sequences: Case) -> SampleOutput:
    """Admit the sequences to rows of a used-looking table and sample one token for each."""
    vocabulary = len(sequences[0].logits)
    rows = used_rows(vocabulary)
    places = [
        each.row if each.row is not None else index + 1 for index, each in enumerate(sequences)
    ]
    rows.admit(
        [
            RowStart(
                row=row,
                length=0,
                tokens=[*each.prompt, *each.output],
                prompt_length=len(each.prompt),
                seed=each.seed,
                params=each.params,
                stop_ids=each.stop_ids,
            )
            for row, each in zip(places, sequences, strict=True)
        ]
    )
    for row, each in zip(places, sequences, strict=True):
        rows.active[row] = each.live
    masks = [mask_line(each.forbidden, vocabulary) for each in sequences]
    info = sampling_batch_info(
        [each.params for each in sequences],
        places,
        range(len(sequences)),
        range(len(sequences)),
        CPU,
        masks,
    )
    positions = torch.tensor([len(each.prompt) + len(each.output) for each in sequences])
    logits = torch.stack([each.logits for each in sequences])
    before = logits.clone()
    result = Sampler().sample(logits, info, rows, positions)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits were written"
    return result


def mask_line(forbidden: Collection[int] | None, vocabulary: int) -> torch.Tensor | None:
    """The line of a mask that forbids these tokens."""
    if forbidden is None:
        return None
    line = torch.full((mask_words(vocabulary),), -1, dtype=torch.int32)
    set_bits(line, list(forbidden), allowed=False)
    return line


def used_rows(vocabulary: int) -> Rows:
    """Rows whose vocabulary columns hold what earlier sequences left there."""

    def allocate(_: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    rows = Rows(NUM_ROWS, vocabulary, allocate)
    rows.token_counts.fill_(5)
    rows.bias.fill_(float("nan"))
    return rows


def random_logits(vocabulary: int = 500, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, generator=generator) * scale


def processed_logprobs(sequence: Case) -> torch.Tensor:
    """[V] processed logprobs by token id."""
    output = sample(sequence)
    assert output.logprobs is not None
    logprobs = torch.empty(len(sequence.logits))
    logprobs[output.logprobs.top_ids[0]] = output.logprobs.top_values[0]
    return logprobs
