"""Logprobs and ranks against float64, with ties, -inf, and row by row."""

import numpy as np
import pytest
import torch

from headrace.kernels import row_selection
from headrace.kernels.logprobs import token_logprobs
from headrace.kernels.ordering import largest, order_keys

INF = float("inf")


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    above = row - row.max()
    with np.errstate(divide="ignore"):
        return above - np.log(np.exp(above).sum())


def order_of(row: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(len(row)), -row.astype(np.float64)))


def random_logits(rows: int, vocabulary: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, vocabulary, generator=generator) * scale


@pytest.mark.parametrize(
    ("vocabulary", "scale"), [(7, 3.0), (49152, 3.0), (262144, 0.01), (50, 40)]
)
def test_values_and_ranks_are_those_of_float64(vocabulary: int, scale: float) -> None:
    logits = random_logits(4, vocabulary, scale)
    chosen = torch.tensor([0, 3, vocabulary - 1, 5])
    extra = torch.tensor([[1, 2], [6, -1], [vocabulary - 1, 0], [-1, -1]])
    values, rank, top_values, top_ids, extra_values, extra_rank = token_logprobs(
        logits, chosen, 5, extra
    )
    assert extra_values is not None
    assert extra_rank is not None
    for row in range(4):
        expected, order = log_softmax(logits[row].numpy()), order_of(logits[row].numpy())
        ranks = np.argsort(order) + 1
        np.testing.assert_allclose(float(values[row]), expected[chosen[row]], atol=2e-6, rtol=1e-6)
        assert int(rank[row]) == ranks[chosen[row]]
        assert top_ids[row].tolist() == order[:5].tolist()
        np.testing.assert_allclose(
            top_values[row].numpy(), expected[order[:5]], atol=2e-6, rtol=1e-6
        )
        for place, token in enumerate(extra[row].tolist()):
            if token >= 0:
                np.testing.assert_allclose(
                    float(extra_values[row, place]), expected[token], atol=2e-6, rtol=1e-6
                )
                assert int(extra_rank[row, place]) == ranks[token]


def test_types_and_shapes() -> None:
    logits = random_logits(3, 11)
    values, rank, top_values, top_ids, extra, extra_rank = token_logprobs(
        logits, torch.tensor([1, 2, 3]), 20
    )
    assert (values.dtype, rank.dtype) == (torch.float32, torch.int64)
    assert (top_values.dtype, top_ids.dtype) == (torch.float32, torch.int64)
    assert (values.shape, rank.shape, top_values.shape, top_ids.shape) == (
        (3,),
        (3,),
        (3, 11),
        (3, 11),
    )
    assert extra is None
    assert extra_rank is None
    assert token_logprobs(logits, torch.tensor([1, 2, 3]), 0)[2].shape == (3, 0)


def test_ties_count_by_id_as_arg_max_does() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0, 5.0, -0.0, 0.0]])
    ranks = [int(token_logprobs(logits, torch.tensor([token]), 0)[1]) for token in range(7)]
    assert ranks == [4, 1, 2, 5, 3, 6, 7]
    assert token_logprobs(logits, torch.tensor([0]), 7)[3][0].tolist() == [1, 2, 4, 0, 3, 5, 6]
    assert ranks[int(logits.argmax())] == 1


def test_rank_and_place_in_the_top_list_agree() -> None:
    logits = random_logits(2, 5000).round(decimals=1)
    ids = token_logprobs(logits, torch.tensor([0, 0]), 300)[3]
    for place in (0, 1, 17, 299):
        assert token_logprobs(logits, ids[:, place], 0)[1].tolist() == [place + 1] * 2


def test_ranks_of_many_named_tokens_are_those_of_few() -> None:
    logits = random_logits(3, 700).round(decimals=1)
    chosen = torch.tensor([5, 6, 7])
    named = torch.arange(700).expand(3, -1)
    _, rank, _, top_ids, _, many = token_logprobs(logits, chosen, 700, named)
    assert many is not None
    assert torch.equal(many.gather(1, top_ids), torch.arange(1, 701).expand(3, -1))
    assert torch.equal(rank, token_logprobs(logits, chosen, 0)[1])
    few = token_logprobs(logits, chosen, 0, named[:, 40:60])[5]
    assert few is not None
    assert torch.equal(many[:, 40:60], few)


def test_forbidden_tokens_have_minus_infinity_and_come_last() -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0]])
    values, rank, top_values, top_ids, *_ = token_logprobs(logits, torch.tensor([2]), 4)
    assert float(values) == -INF
    assert int(rank) == 4
    assert top_ids[0].tolist() == [1, 3, 0, 2]
    np.testing.assert_allclose(top_values[0, :2].numpy(), np.log(0.5), atol=1e-7)
    assert top_values[0, 2:].tolist() == [-INF, -INF]


def test_a_certain_token_has_logprob_zero_and_a_lost_one_a_number() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 9] = 200.0
    values, rank, *_ = token_logprobs(logits, torch.tensor([9]), 1)
    assert (float(values), int(rank)) == (0.0, 1)
    assert float(token_logprobs(logits, torch.tensor([3]), 1)[0]) == pytest.approx(-200.0)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38]])
    assert float(token_logprobs(logits, torch.tensor([2]), 1)[0]) == pytest.approx(np.log(0.5))


def test_a_row_is_the_same_bit_for_bit_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(37, 10007, 2.0)
    logits[5] = float("nan")
    chosen = torch.arange(37) * 11
    extra = torch.stack([chosen + 1, chosen + 2], 1)
    batch = token_logprobs(logits, chosen, 9, extra)
    monkeypatch.setattr(row_selection, "_CPU_ELEMENTS", 1)
    one_by_one = token_logprobs(logits, chosen, 9, extra)
    monkeypatch.setattr(row_selection, "_CPU_ELEMENTS", 1 << 30)
    at_once = token_logprobs(logits, chosen, 9, extra)
    for row in [0, 4, 6, 20, 36]:
        at = slice(row, row + 1)
        alone = token_logprobs(logits[at], chosen[at], 9, extra[at])
        for other in (batch, one_by_one, at_once):
            for mine, theirs in zip(alone, other, strict=True):
                assert mine is not None
                assert theirs is not None
                assert torch.equal(mine[0], theirs[row])


def test_no_rows() -> None:
    values, rank, top_values, *_ = token_logprobs(
        torch.empty(0, 10), torch.empty(0, dtype=torch.int64), 3
    )
    assert (values.shape, rank.shape, top_values.shape) == ((0,), (0,), (0, 3))


def test_keys_order_every_kind_of_number() -> None:
    numbers = [INF, 3e38, 1.0, 1e-45, 0.0, -1e-45, -1.0, -3e38, -INF]
    keys = order_keys(torch.tensor([numbers]))[0].tolist()
    assert keys == sorted(keys, reverse=True)
    assert len(set(order_keys(torch.zeros(1, 100))[0].tolist())) == 100


@pytest.mark.parametrize("count", [1, 5, 199, 200])
def test_largest_settles_ties_by_id(count: int) -> None:
    logits = random_logits(3, 200).round()
    values, ids = largest(logits, count)
    for row in range(3):
        expected = order_of(logits[row].numpy())[:count]
        assert ids[row].tolist() == expected.tolist()
        assert torch.equal(values[row], logits[row][ids[row]])
