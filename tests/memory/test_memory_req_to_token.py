"""Rows and their page tables."""

import random

import pytest
import torch

from headrace.memory.arena import Arena
from headrace.memory.req_to_token import ReqToTokenPool


def make_pool(num_rows: int = 4, max_pages: int = 5) -> ReqToTokenPool:
    return ReqToTokenPool(
        Arena("cpu"), num_rows=num_rows, max_pages=max_pages, groups=("full", "window")
    )


def test_rows_are_handed_out_once_and_never_row_0() -> None:
    pool = make_pool()
    assert [pool.allocate_row() for _ in range(4)] == [1, 2, 3, None]
    assert pool.available_rows == 0
    pool.free_row(2)
    assert (pool.available_rows, pool.live_rows) == (1, {1, 3})
    assert pool.allocate_row() == 2


@pytest.mark.parametrize("row", [0, 2, 9])
def test_freeing_a_row_that_is_not_taken_names_it(row: int) -> None:
    pool = make_pool()
    pool.allocate_row()
    with pytest.raises(AssertionError, match=f"row {row} is not taken"):
        pool.free_row(row)


def test_nothing_reaches_the_device_before_flush() -> None:
    pool = make_pool()
    row = pool.allocate_row()
    assert row is not None
    pool.stage(row, 1, [7, 8])
    assert not pool.table("full").any()
    assert pool.flush() == 2
    for group in pool.groups:
        assert pool.table(group).tolist() == [[0] * 5, [0, 7, 8, 0, 0], [0] * 5, [0] * 5]
        assert pool.table(group).dtype == torch.int32
    assert pool.flush() == 0


def test_a_later_change_of_the_same_place_holds() -> None:
    pool = make_pool()
    row = pool.allocate_row()
    assert row is not None
    pool.stage(row, 0, [1, 2, 3])
    pool.free_row(row)
    assert pool.allocate_row() == row
    pool.stage(row, 1, [9])
    pool.flush()
    assert pool.table("full")[row, :3].tolist() == [1, 9, 3]


def test_addresses_stay() -> None:
    pool = make_pool()
    row = pool.allocate_row()
    assert row is not None
    before = pool.table("full").data_ptr()
    pool.stage(row, 0, [1])
    pool.flush()
    assert pool.table("full").data_ptr() == before


@pytest.mark.parametrize(("column", "pages"), [(4, [1, 2]), (-1, [1]), (5, [1])])
def test_changes_outside_the_table_are_refused(column: int, pages: list[int]) -> None:
    pool = make_pool()
    row = pool.allocate_row()
    assert row is not None
    with pytest.raises(AssertionError, match="do not fit"):
        pool.stage(row, column, pages)
    pool.stage(row, 5, [])
    assert pool.flush() == 0


def test_the_padding_row_cannot_be_changed() -> None:
    with pytest.raises(AssertionError, match="row 0 is not taken"):
        make_pool().stage(0, 0, [1])


def test_random_changes_equal_a_plain_table() -> None:
    chance = random.Random(0)
    pool = make_pool(num_rows=7, max_pages=11)
    expected = torch.zeros(7, 11, dtype=torch.int32)
    for _ in range(6):
        pool.allocate_row()
    for _ in range(300):
        row, column = chance.randint(1, 6), chance.randint(0, 10)
        pages = [chance.randint(1, 99) for _ in range(chance.randint(0, 11 - column))]
        pool.stage(row, column, pages)
        expected[row, column : column + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        if chance.random() < 0.3:
            pool.flush()
            assert all(torch.equal(pool.table(name), expected) for name in pool.groups)


@pytest.mark.gpu
def test_flush_on_a_gpu_never_waits_and_keeps_order() -> None:
    pool = ReqToTokenPool(Arena("cuda"), num_rows=64, max_pages=64, groups=("full", "window"))
    expected = torch.zeros(64, 64, dtype=torch.int32)
    for _ in range(63):
        pool.allocate_row()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(500):  # many copies in flight: no staging block may be reused early
            row = 1 + step % 63
            pool.stage(row, step % 32, [step + 1] * 32)
            expected[row, step % 32 : step % 32 + 32] = step + 1
            pool.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(pool.table("full").cpu(), expected)
    assert torch.equal(pool.table("window").cpu(), expected)
