"""Pages are handed out whole, once, and in an order that every rank repeats."""

import pytest

from headrace.memory.page_allocator import PageAllocator


def test_hands_out_every_page_but_the_padding_page() -> None:
    allocator = PageAllocator(9)
    assert (allocator.total, allocator.available) == (8, 8)
    assert allocator.allocate(3) == [1, 2, 3]
    assert allocator.allocate(5) == [4, 5, 6, 7, 8]
    assert allocator.available == 0


def test_takes_nothing_when_too_few_are_free() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.available == 3
    assert allocator.allocate(0) == []


def test_freed_pages_come_back_in_the_order_they_were_given() -> None:
    allocator = PageAllocator(9)
    allocator.allocate(6)
    allocator.free([2, 5, 3])
    assert allocator.allocate(4) == [2, 5, 3, 7]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 0], "page 0 cannot be freed: it is the padding page"),
        ([1, 9], "page 9 cannot be freed: the pool holds pages 1 to 8"),
        ([1, -1], "page -1 cannot be freed"),
        ([1, 7], "page 7 cannot be freed: it is free already"),
        ([1, 2, 1], "page 1 cannot be freed: it is free already"),
    ],
)
def test_a_wrong_free_names_the_page_and_frees_nothing(pages: list[int], message: str) -> None:
    allocator = PageAllocator(9)
    allocator.allocate(3)
    with pytest.raises(AssertionError, match=message):
        allocator.free(pages)
    assert allocator.available == 5
    allocator.free([1, 2, 3])
    assert allocator.available == 8


def test_refuses_a_pool_without_a_usable_page() -> None:
    with pytest.raises(AssertionError, match="1 pages leave none"):
        PageAllocator(1)


def test_refuses_a_negative_count() -> None:
    with pytest.raises(AssertionError, match="-1 pages"):
        PageAllocator(3).allocate(-1)
