"""Sampling by kernels is the torch sampler with the advance behind it, in tokens and in columns."""

from typing import Any

import pytest
import torch
from sampling_cases import random_logits

pytest.importorskip("triton", reason="the kernels need the triton package")

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.outputs import LogitsProcessorOutput, SampleOutput
from headrace.batch.rows import Rows, RowStart
from headrace.kernels import sampling_triton
from headrace.request.sampling_params import SamplingParams
from headrace.sampling import kernel_sampler
from headrace.sampling.host_mask import mask_line
from headrace.sampling.kernel_sampler import KernelSampler
from headrace.sampling.requirements import sampling_batch_info
from headrace.sampling.sampler import Sampler
from headrace.sampling.step_sampler import StepSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 300
PLAIN = [
    SamplingParams(temperature=0),
    SamplingParams(logprobs=3),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.3),
    SamplingParams(repetition_penalty=1.4, temperature=0, logprobs=2),
    SamplingParams(logit_bias={3: 50.0}),  # a stop id
    SamplingParams(min_tokens=40, temperature=0.9, logit_bias={3: 50.0}),
]
FILTERED = [
    *PLAIN,
    SamplingParams(top_k=7, temperature=0.5),
    SamplingParams(top_p=0.8, logprobs=3),
    SamplingParams(min_p=0.1, temperature=1.6),
]
ENDED, BROKEN = 2, 3  # rows: one that has stopped, one whose logits are NaN
COLUMNS = ("length", "last_token", "active", "token_counts")


def a_row(row: int, params: SamplingParams) -> RowStart:
    return RowStart(
        row=row,
        length=row % 3,
        tokens=[5] * 60,
        prompt_length=1,
        seed=row - 3,
        params=params,
        stop_ids=[3, 4],
    )


class Step:
    """A step of rows 1 to n in front of two that bring prompt tokens and sample nothing."""

    def __init__(self, params: list[SamplingParams], *, kernels: bool, decode: bool = False):
        def allocate(_: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(tuple(shape), dtype=dtype, device=DEVICE)

        every = params if decode else [*params, PLAIN[0], PLAIN[1]]
        self.rows = Rows(len(every) + 1, VOCABULARY, allocate)
        self.rows.admit([a_row(place + 1, each) for place, each in enumerate(every)])
        self.rows.active[ENDED] = False
        self.batch = self._batch(params, len(every), decode)
        self.kernels = KernelSampler(self.rows, 9, pdl=False) if kernels else None
        self.sampler = StepSampler(self.rows, Sampler(), self.kernels)

    def _batch(self, params: list[SamplingParams], count: int, decode: bool) -> ForwardBatch:
        rows = torch.arange(1, count + 1, device=DEVICE)
        new = torch.arange(1, count + 1, dtype=torch.int32, device=DEVICE)
        live, before = self.rows.active[rows], self.rows.length[rows]
        extend = torch.where(live, 1 if decode else new, 0).int()
        mode = ForwardMode.DECODE if decode else ForwardMode.EXTEND
        places = list(range(len(params)))
        ids = [place + 1 for place in places]
        return ForwardBatch(
            mode=mode,
            rows=rows,
            bounds=HostBounds(seq_lens=[9] * count, extend_lens=[1] * count, rows=rows.tolist()),
            facts=BatchFacts(mode=mode, tokens=1, live_tokens=1, sequences=1, max_length=9),
            seq_lens=torch.where(live, before + extend, 0),
            extend_lens=None if decode else extend,
            sampling=sampling_batch_info(params, ids, places, places, DEVICE),
        )

    def sample(self, seed: int = 0) -> SampleOutput | None:
        info = self.batch.sampling
        count = 0 if info is None else len(info.rows)
        logits = [random_logits(VOCABULARY, seed=seed + place) for place in range(count)]
        if count >= BROKEN:
            logits[BROKEN - 1][7] = float("nan")
        values = torch.stack(logits).to(DEVICE) if logits else torch.empty(0, VOCABULARY)
        output = LogitsProcessorOutput(next_token_logits=values)
        return self.sampler.sample(output, self.batch)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_tokens_columns_and_logprobs_are_those_of_torch(
    params: list[SamplingParams], decode: bool
) -> None:
    steps = [Step(params, kernels=kernels, decode=decode) for kernels in (False, True)]
    outputs = [step.sample() for step in steps]
    torch_way, kernel_way = outputs
    assert torch_way is not None
    assert kernel_way is not None
    live = torch.arange(1, len(params) + 1, device=DEVICE) != ENDED
    assert torch.equal(torch_way.next_token_ids[live], kernel_way.next_token_ids[live])
    assert torch.equal(torch_way.finite, kernel_way.finite)
    assert kernel_way.finite.tolist() == [row != BROKEN for row in range(1, len(params) + 1)]
    for name in COLUMNS:
        mine, theirs = (getattr(step.rows, name) for step in steps)
        assert torch.equal(mine, theirs), name
    active = steps[1].rows.active
    assert not active[5], "a stop id ends the row"
    assert active[6], "but not before its tokens are enough"
    assert torch_way.logprobs is not None
    assert kernel_way.logprobs is not None
    for name in ("chosen", "rank", "top_ids", "top_values"):
        mine, theirs = (getattr(each.logprobs, name) for each in (torch_way, kernel_way))
        asked = [row for row, each in enumerate(params, 1) if each.logprobs is not None]
        assert len(mine) == len(theirs) == len(asked)
        compared = [line for line, row in enumerate(asked) if row != ENDED]
        torch.testing.assert_close(mine[compared], theirs[compared], equal_nan=True)


def test_long_lists_of_logprobs_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = SamplingParams(logprobs=3, temperature=0), SamplingParams(logprobs=60)
    named = SamplingParams(logprob_token_ids=list(range(40)), logprobs=2, temperature=0)
    wide = [
        Step([few, each], kernels=kernels) for each in (many, named) for kernels in (False, True)
    ]
    monkeypatch.setattr(kernel_sampler, "token_logprobs", None)  # may not be called
    outputs = [step.sample() for step in wide]
    for torch_way, kernel_way in (outputs[:2], outputs[2:]):
        assert torch_way is not None
        assert kernel_way is not None
        assert torch_way.logprobs is not None
        assert kernel_way.logprobs is not None
        assert torch.equal(torch_way.logprobs.top_ids[0], kernel_way.logprobs.top_ids[0])
    assert outputs[1] is not None
    assert outputs[1].logprobs is not None
    assert outputs[1].logprobs.top_ids.shape == (2, 60)


def test_a_step_that_samples_nothing_advances_its_rows() -> None:
    steps = [Step(PLAIN, kernels=kernels) for kernels in (False, True)]
    for step in steps:
        step.batch.sampling = None
        assert step.sample() is None
    assert torch.equal(steps[0].rows.length, steps[1].rows.length)
    assert steps[1].rows.length[1:].tolist() == [2, 2, 3, 5, 7, 6, 8, 10]


def test_what_only_torch_can_do_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(PLAIN, kernels=True)
    kernels = step.kernels
    assert kernels is not None
    info = step.batch.sampling
    assert info is not None
    assert kernels.takes(info)
    assert kernels.takes(None)
    one = ([1], [0], [0], DEVICE)
    masked = sampling_batch_info(PLAIN[:1], *one, [mask_line([1], VOCABULARY)])
    assert not kernels.takes(masked)
    processed = [SamplingParams(logprobs=1, logprobs_mode="processed")]
    assert not kernels.takes(sampling_batch_info(processed, *one))
    monkeypatch.setattr(kernel_sampler, "MAX_VOCABULARY", VOCABULARY - 1)
    assert not kernels.takes(info)
    assert sampling_triton.MAX_VOCABULARY >= 1 << 18

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("kernels were launched")

    monkeypatch.setattr(kernel_sampler, "advance_lengths", refuse)
    assert step.sample() is not None
