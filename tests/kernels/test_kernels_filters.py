"""Filters against float64, against transformers' warpers, with ties, and row by row."""

import numpy as np
import pytest
import torch
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.kernels import filters
from headrace.kernels.filters import filter_logits

INF = float("inf")


def filtered(
    logits: torch.Tensor,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
) -> torch.Tensor:
    rows = len(logits)

    def column(value: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return filter_logits(
        logits,
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
    )


def reference(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Ids that stay, ascending: float64, a full sort, ties by id."""
    row = row.astype(np.float64)
    order = np.lexsort((np.arange(len(row)), -row))
    if 0 < top_k < len(row):
        order = order[:top_k]
    weights = np.exp(row[order] - row.max())
    probabilities = weights / weights.sum()
    count = len(order)
    if top_p < 1.0:
        count = int((np.cumsum(probabilities) - probabilities < top_p).sum())
    order = order[:count]
    if min_p > 0.0:
        order = order[weights[:count] >= min_p]
    return np.sort(order)


def kept_ids(row: torch.Tensor) -> np.ndarray:
    return (row > -INF).nonzero()[:, 0].numpy()


def random_logits(rows: int, vocabulary: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * scale


SETTINGS = [
    (50, 1.0, 0.0),
    (1, 1.0, 0.0),
    (127, 1.0, 0.0),
    (128, 1.0, 0.0),
    (129, 1.0, 0.0),
    (2500, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 0.001, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (0, 1.0, 1e-6),
    (50, 0.9, 0.02),
    (1000, 0.95, 0.0),
    (3000, 0.95, 0.0),
    (3000, 1.0, 0.0001),
    (0, 0.95, 0.01),
]


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 12.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
def test_same_tokens_as_float64(top_k: int, top_p: float, min_p: float, scale: float) -> None:
    logits = random_logits(3, 5000, scale)
    result = filtered(logits, top_k, top_p, min_p)
    for row in range(3):
        ids = kept_ids(result[row])
        assert np.array_equal(ids, reference(logits[row].numpy(), top_k, top_p, min_p))
        assert torch.equal(result[row][ids], logits[row][ids])


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
def test_looking_at_a_part_first_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, top_k: int, top_p: float, min_p: float
) -> None:
    """The sorted whole (what a device does) and the growing parts agree, flat and peaked rows."""
    logits = torch.cat([random_logits(2, 4000, scale) for scale in (0.05, 1.0, 3.0)])
    logits = logits.round(decimals=1)  # many ties
    parts = filtered(logits, top_k, top_p, min_p)
    monkeypatch.setattr(filters, "_CPU_WIDTHS", ())
    assert torch.equal(filtered(logits, top_k, top_p, min_p), parts)
    monkeypatch.setattr(filters, "_CPU_WIDTHS", (1, 2, 3, 700))
    assert torch.equal(filtered(logits, top_k, top_p, min_p), parts)


def test_ties_at_the_last_place_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 250] = 1.0
    assert kept_ids(filtered(logits, top_k=4)[0]).tolist() == [0, 1, 2, 250]
    signed_zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert kept_ids(filtered(signed_zeros, top_k=2)[0]).tolist() == [0, 1]
    assert kept_ids(filtered(torch.zeros(1, 4), top_p=0.5)[0]).tolist() == [0, 1]
    assert kept_ids(filtered(torch.zeros(1, 4), top_p=0.51)[0]).tolist() == [0, 1, 2]
    assert kept_ids(filtered(torch.zeros(1, 4), min_p=1.0)[0]).tolist() == [0, 1, 2, 3]


def test_top_p_is_of_what_top_k_left() -> None:
    """Probabilities .4 .3 .2 .1: of the first two .4 is 4/7 = .571, so top-p .55 keeps one."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_ids(filtered(logits, top_p=0.55)[0]).tolist() == [0, 1]
    assert kept_ids(filtered(logits, top_k=2, top_p=0.55)[0]).tolist() == [0]


def test_off_settings_change_no_bit() -> None:
    logits = random_logits(4, 3000, 3.0)
    logits[0, 5] = -INF
    result = filtered(logits, top_k=[0, -1, 3000, 2**30], top_p=[1.0] * 4, min_p=[0.0] * 4)
    assert torch.equal(result, logits)


def test_a_huge_top_k_on_a_one_hot_row_keeps_the_one() -> None:
    """A joint sampler returned an id out of the vocabulary."""
    logits = torch.full((1, 1000), -INF)
    logits[0, 1] = 0.0
    assert kept_ids(filtered(logits, top_k=2**30)[0]).tolist() == [1]
    assert kept_ids(filtered(logits, top_k=2**30, top_p=0.9, min_p=0.5)[0]).tolist() == [1]


def test_a_top_p_that_rounds_to_zero_keeps_the_likeliest() -> None:
    """A top_p of 0 made NaN elsewhere; here the smallest legal values keep one token."""
    logits = random_logits(1, 3000, 2.0)
    best = [int(logits[0].argmax())]
    assert kept_ids(filtered(logits, top_p=1e-60)[0]).tolist() == best
    assert kept_ids(filtered(logits, top_p=1e-30)[0]).tolist() == best


def test_a_row_never_depends_on_its_mates() -> None:
    logits = random_logits(7, 3001, 2.0)
    logits[6] = float("nan")
    top_k, min_p = [0, 20, 0, 5, 0, 2900, 3], [0.0, 0.0, 0.1, 0.01, 0.0, 0.0, 0.0]
    top_p = [1.0, 1.0, 1.0, 0.8, 0.97, 0.9, 0.5]
    batch = filtered(logits, top_k, top_p, min_p)
    assert torch.equal(batch[0], logits[0])
    for row in range(6):
        alone = filtered(logits[row : row + 1], top_k[row], top_p[row], min_p[row])
        assert torch.equal(alone[0], batch[row])
        assert len(kept_ids(batch[row])) >= 1


def test_forbidden_tokens_stay_forbidden_and_weigh_nothing() -> None:
    logits = random_logits(1, 3000, 1.0)
    logits[0, 100:] = -INF
    result = filtered(logits, top_k=200, top_p=0.9)
    expected = reference(logits[0, :100].numpy(), 0, 0.9, 0.0)
    assert np.array_equal(kept_ids(result[0]), expected)


def test_the_input_is_not_written() -> None:
    logits = random_logits(2, 3000, 1.0)
    before = logits.clone()
    filtered(logits, top_k=[5, 0], top_p=[0.9, 0.99])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(40, 1.0, 0.0), (0, 0.92, 0.0), (0, 1.0, 0.07), (60, 0.8, 0.0), (200, 0.9, 0.02)],
)
def test_same_values_as_transformers_warpers(
    top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    logits = random_logits(8, 6000, scale, seed=3)
    expected = logits.clone()
    if top_k:
        expected = TopKLogitsWarper(top_k=top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p=top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p=min_p)(None, expected)
    result = filtered(logits, top_k, top_p, min_p)
    # Their float32 running sum may put the border one token elsewhere; never more.
    differing = (result != expected).sum(-1)
    assert int(differing.max()) <= 1
    assert int((differing > 0).sum()) <= 1
