"""Which pages are free. The pages themselves live in the KV pools, under the same numbers."""

from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out pages 1 .. num_pages-1; page 0 takes the writes of padding and is nobody's.

    Every operation costs the same per page, however many there are. The order is deterministic
    (last freed, first reused), so that ranks that run the same schedule name the same pages.
    A page given back twice would later belong to two sequences, so that is an `AssertionError`
    even under `python -O`.

    Args:
        num_pages: pages of the pool, the padding page included (at least 2).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise AssertionError(f"{num_pages} pages leave none besides the padding page")
        self._num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: its end is taken first
        self._is_taken = bytearray(num_pages)

    @property
    def total(self) -> int:
        """Pages that can be handed out at all."""
        return self._num_pages - 1

    @property
    def available(self) -> int:
        """Pages that are free now."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        """Whether a page of 1 .. total lies in the free list."""
        return not self._is_taken[page]

    def free_pages(self) -> Sequence[int]:
        """A copy of the free list, the page handed out next last."""
        return tuple(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, or nothing and `None` where fewer are free."""
        if count < 0:
            raise AssertionError(f"asked for {count} pages")
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._is_taken[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, all of them or, where one is not the caller's to give, none.

        Raises:
            AssertionError: page 0, a page outside the pool, one that is free already, or one
                named twice; the message names it.
        """
        pages = list(pages)
        for position, page in enumerate(pages):
            problem = self._problem(page)
            if problem:
                self._mark_taken(pages[:position])
                raise AssertionError(f"page {page} cannot be freed: {problem}")
            self._is_taken[page] = 0
        self._free.extend(reversed(pages))

    def _problem(self, page: int) -> str:
        if page == 0:
            return "it is the padding page"
        if not 0 < page < self._num_pages:
            return f"the pool holds pages 1 to {self._num_pages - 1}"
        if not self._is_taken[page]:
            return "it is free already"
        return ""

    def _mark_taken(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._is_taken[page] = 1
