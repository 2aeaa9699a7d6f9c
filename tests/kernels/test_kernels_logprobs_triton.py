"""Logprobs by kernels are the twin's: ties, -inf, NaN, several tiles, and only rows that ask."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the triton package")

from headrace.base.errors import UnsupportedError
from headrace.kernels import logprobs, logprobs_triton
from headrace.kernels.logprobs_triton import LogprobScratch, kernel_takes, token_logprobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 6
INF, NAN = float("inf"), float("nan")
Tensors = tuple[torch.Tensor | None, ...]


def draw(vocabulary: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (torch.randn(ROWS, vocabulary, generator=generator) * scale).to(DEVICE)


def both(
    logits: torch.Tensor,
    top: int,
    index: list[int],
    named: torch.Tensor | None = None,
    scratch: LogprobScratch | None = None,
) -> tuple[Tensors, Tensors]:
    """By the kernels, and by the twin; the kernels' scratch must come back empty."""
    chosen = torch.arange(len(logits), device=DEVICE) * 5 % logits.shape[1]
    rows = torch.tensor(index, dtype=torch.int64, device=DEVICE)
    scratch = scratch or LogprobScratch.allocate(len(index), DEVICE)
    ours = token_logprobs(logits, chosen, top, named, index=rows, scratch=scratch)
    for counts in (scratch.mass, scratch.before, scratch.arrived):
        assert not counts.any()
    return ours, logprobs.token_logprobs(logits[rows], chosen[rows], top, named)


def same(ours: Tensors, theirs: Tensors) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None
            continue
        assert mine is not None
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        if mine.dtype == torch.int64:
            assert torch.equal(mine, other)
        else:
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("vocabulary", "top", "scale"),
    [(7, 20, 3.0), (300, 0, 3.0), (2048, 32, 0.01), (5000, 5, 40.0), (70001, 20, 3.0)],
)
def test_numbers_are_the_twins(vocabulary: int, top: int, scale: float) -> None:
    logits = draw(vocabulary, scale)
    named = torch.tensor([[1, 6, -1], [vocabulary - 1, 0, 2]], device=DEVICE)
    same(*both(logits, top, [4, 1], named))
    same(*both(logits, top, list(range(ROWS))))


def test_ties_are_settled_by_id_within_and_across_tiles() -> None:
    """Every logit equal, and few values for many tokens: a tile may fill the list alone."""
    logits = torch.zeros(ROWS, 9000, device=DEVICE)
    logits[1:] = draw(9000)[1:].round()
    logits[2, 3000:] = -0.0
    logits[3] = torch.arange(9000.0, 0.0, -1.0)
    logits[4] = torch.arange(9000.0)
    ours, theirs = both(logits, 32, list(range(ROWS)))
    same(ours, theirs)
    assert ours[3] is not None
    assert ours[3][0].tolist() == list(range(32))
    assert ours[3][4].tolist() == list(range(8999, 8967, -1))


def test_forbidden_tokens_have_minus_infinity_and_come_last() -> None:
    logits = torch.full((ROWS, 4100), -INF, device=DEVICE)
    logits[:, 4098], logits[:, 7] = 1.0, 1.0
    ours, theirs = both(logits, 4, [0, 3])
    same(ours, theirs)
    assert ours[3] is not None
    assert ours[3].tolist() == [[7, 4098, 0, 1]] * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("nan", [NAN, -NAN])
def test_rows_that_are_broken_leave_the_others_alone(nan: float) -> None:
    logits = draw(5000)
    logits[1, 4000] = nan
    logits[2] = -INF
    logits[4] = nan
    ours, theirs = both(logits, 6, list(range(ROWS)))
    for mine, other in zip(ours[:4], theirs[:4], strict=True):
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine[[0, 3, 5]], other[[0, 3, 5]])
    for values in (ours[0], ours[2]):
        assert values is not None
        assert values[[1, 2, 4]].isnan().all()
    for counts in (ours[1], ours[3]):
        assert counts is not None
        assert ((counts >= 0) & (counts <= 5000)).all()


def test_a_row_is_the_same_bit_for_bit_in_any_company() -> None:
    logits = draw(6000)
    scratch = LogprobScratch.allocate(ROWS + 2, DEVICE)
    together, _ = both(logits, 9, [0, 1, 2, 3, 4, 5, 2], scratch=scratch)
    alone, _ = both(logits, 9, [2], scratch=scratch)
    for mine, theirs in zip(alone[:4], together[:4], strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine[0], theirs[2])
        assert torch.equal(mine[0], theirs[6])


def test_rows_that_do_not_ask_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch: rows beyond those that ask, wide strides, and results side by side."""
    logits = torch.full((ROWS, 3000), NAN, device=DEVICE)
    logits[3] = draw(3000)[3]
    ours, theirs = both(logits[:, :2900], 3, [3])
    same(ours, theirs)
    storages = {part.untyped_storage().data_ptr() for part in ours if part is not None}
    assert len(storages) == 1
    monkeypatch.setattr(logprobs_triton, "_launches", lambda *_: (None, None))  # no rows, none
    nobody = both(logits, 3, [])[0][2]
    assert nobody is not None
    assert nobody.shape == (0, 3)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    assert kernel_takes(32, 31, 151936)
    assert not kernel_takes(33, 0, 151936)
    assert not kernel_takes(0, 32, 151936)
    assert not kernel_takes(0, 0, (1 << 20) + 1)
    with pytest.raises(UnsupportedError, match="torch twin"):
        both(draw(100), 33, [0])
    with pytest.raises(UnsupportedError, match="float32"):
        both(draw(100).half(), 3, [0])
