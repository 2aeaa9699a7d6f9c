"""Which rows get logits, and prompt logprobs in slices."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.sampling_batch_info import SamplingBatchInfo
from headrace.batch.side_request import HiddenStateRequest, PromptLogprobRequest, SideRequest
from headrace.layers import logits as logits_module
from headrace.layers.logits import process_logits

VOCAB, HIDDEN = 11, 4


class Head:
    """A head whose rows can be told apart, and which notes how many it was asked for."""

    def __init__(self) -> None:
        self.traits = SimpleNamespace(vocab_size=VOCAB)
        self.matrix = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(0))
        self.asked: list[int] = []

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.asked.append(len(hidden))
        return hidden @ self.matrix


class StatesOnly(Head):
    """Its head is in no dtype but its own, and nobody samples."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert not len(hidden)
        return hidden.new_empty(0, VOCAB)


def step(chosen: list[int] | None, tokens: int, side: SideRequest | None = None) -> ForwardBatch:
    """A step of `tokens` tokens of one sequence each, of which the `chosen` sample."""
    index = torch.tensor(chosen or [], dtype=torch.int64)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        rows=torch.arange(1, tokens + 1),
        bounds=HostBounds(seq_lens=[1] * tokens, extend_lens=[1] * tokens),
        facts=BatchFacts(
            mode=ForwardMode.EXTEND,
            tokens=tokens,
            live_tokens=tokens,
            sequences=tokens,
            max_length=1,
        ),
        sampling=None
        if chosen is None
        else SamplingBatchInfo(
            rows=index + 1, sequence_index=index, token_index=index, all_greedy=True
        ),
        side=side or SideRequest(),
    )


@pytest.mark.parametrize(
    ("tokens", "chosen"), [(9, [2, 3, 8]), (9, [8]), (5, [4, 0]), (3, []), (3, None), (0, None)]
)
def test_logits_of_the_rows_that_sample(tokens: int, chosen: list[int] | None) -> None:
    head, hidden = Head(), torch.randn(tokens, HIDDEN)
    output = process_logits(head, hidden, step(chosen, tokens))
    expected = hidden[chosen or []] @ head.matrix
    torch.testing.assert_close(output.next_token_logits, expected)
    assert output.prompt_logprobs is None
    assert head.asked == [len(chosen or [])]


@pytest.mark.parametrize("slice_rows", [1, 3, 100])
def test_prompt_logprobs_come_in_slices(slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_module, "SLICE_BYTES", slice_rows * 4 * VOCAB)
    head, hidden = Head(), torch.randn(9, HIDDEN)
    index, targets = torch.tensor([0, 1, 2, 4, 5, 6, 7]), torch.tensor([1, 10, 0, 3, 3, 7, 2])
    side = SideRequest(
        prompt_logprobs=PromptLogprobRequest(token_index=index, targets=targets, top=3)
    )
    output = process_logits(head, hidden, step([3, 8], 9, side))
    found = output.prompt_logprobs
    assert found is not None
    exact = (hidden[index] @ head.matrix).double().log_softmax(-1)
    chosen = exact.gather(1, targets[:, None])
    torch.testing.assert_close(found.chosen.double(), chosen[:, 0], rtol=0, atol=1e-5)
    assert found.rank.tolist() == (1 + (exact > chosen).sum(-1)).tolist()
    values, ids = exact.topk(3)
    torch.testing.assert_close(found.top_values.double(), values, rtol=0, atol=1e-5)
    assert torch.equal(found.top_ids, ids)
    assert max(head.asked[1:]) <= slice_rows
    assert sum(head.asked[1:]) == len(index)


def test_a_slice_holds_a_row_of_a_huge_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_module, "SLICE_BYTES", 1)
    side = SideRequest(
        prompt_logprobs=PromptLogprobRequest(
            token_index=torch.tensor([0, 1]), targets=torch.tensor([1, 2]), top=0
        )
    )
    output = process_logits(Head(), torch.randn(3, HIDDEN), step([2], 3, side))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs.chosen.shape == (2,)
    assert output.prompt_logprobs.top_ids.shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_taken_and_kept(dtype: torch.dtype) -> None:
    hidden = torch.randn(9, HIDDEN).to(dtype)
    hidden[4] *= 1e6  # what float32 sums lose beside it
    side = SideRequest(
        hidden=HiddenStateRequest(token_index=torch.tensor([7, 0]), sums=((2, 6), (8, 9)))
    )
    found = process_logits(StatesOnly(), hidden, step(None, 9, side)).hidden
    assert found is not None
    known, exact = hidden.clone(), hidden.double()
    hidden.fill_(torch.nan)  # as the next step of a path does
    assert torch.equal(found.tokens, known[[7, 0], None])
    assert found.sums.dtype == torch.float64
    sums = torch.stack((exact[2:6].sum(0), exact[8]))
    torch.testing.assert_close(found.sums, sums, rtol=0, atol=1e-9)


def test_only_what_is_asked_is_taken() -> None:
    hidden = torch.randn(5, HIDDEN)
    assert process_logits(StatesOnly(), hidden, step(None, 5)).hidden is None
    only = SideRequest(hidden=HiddenStateRequest(sums=((0, 5),)))
    found = process_logits(StatesOnly(), hidden, step(None, 5, only)).hidden
    assert found is not None
    assert found.tokens is None


def test_sums_have_the_same_bits_however_a_prompt_is_cut() -> None:
    draw = torch.Generator().manual_seed(5)
    states = torch.randn(4000, 7, generator=draw) * torch.logspace(-12, 2, 4000)[:, None]
    whole = logits_module.exact_sum(states)
    for step in (1, 3, 64, 1000):
        parts = torch.zeros(7, dtype=torch.float64)
        for part in states.split(step):
            parts = parts + logits_module.exact_sum(part)
        assert torch.equal(parts, whole), step
    plain = sum(part.sum(0, dtype=torch.float64) for part in states.split(3))
    assert not torch.equal(plain, states.sum(0, dtype=torch.float64))  # without rounding it shows
    assert logits_module.exact_sum(torch.tensor([[torch.nan], [1.0]])).isnan().all()
