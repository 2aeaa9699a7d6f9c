"""Pages and rows of sequences: taking, growing, giving back, sharing through the prefix cache.

Every page is in exactly one place: free, in the radix tree, or owned by one sequence.
"""

from collections.abc import Collection, Iterable

from headrace.memory.integrity import check_integrity
from headrace.memory.page_allocator import PageAllocator
from headrace.memory.radix_cache import RadixCache
from headrace.memory.radix_node import CacheKey
from headrace.memory.req_to_token import ReqToTokenPool
from headrace.scheduler.sequence import Sequence


class PageKeeper:
    """Owner of allocator and prefix cache.

    Args:
        rows: rows and page tables.
        num_pages: pages of the pool with the padding page.
        page_size: tokens per page.
        enable_prefix_cache: share prefixes between requests; without it only the sequences of
            one request share their prompt, in a namespace that ends with the request.
    """

    def __init__(
        self, rows: ReqToTokenPool, num_pages: int, page_size: int, enable_prefix_cache: bool
    ) -> None:
        self.page_size = page_size
        self.enable_prefix_cache = enable_prefix_cache
        self.rows = rows
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(page_size, self.allocator)
        self.weights_version = 0
        self.suspect: set[int] = set()  # pages that hold what they should not, until taken anew
        self.queried_tokens = self.hit_tokens = 0  # of prompts when they are first admitted

    @property
    def capacity_tokens(self) -> int:
        return self.allocator.total * self.page_size

    def take_row(self, sequence: Sequence, headroom: int) -> bool:
        """Give a waiting sequence a row, its cached prefix, and pages for all its known tokens.

        `headroom` pages must stay available for sequences that already run. Takes nothing and
        returns False where row or pages are missing.
        """
        if not self.rows.available_rows:
            return False
        # A cached prefix ends before the last token, whose logits are needed, and before the first
        # one whose own logprob or hidden state is asked. Locking it takes its pages out of what can
        # be evicted, so ask after the lock.
        match = self.cache.match(self._key(sequence), sequence.tokens[: sequence.first_needed])
        self.cache.lock(match.node)
        needed = self._pages_for(len(sequence.tokens)) - len(match.pages)
        fresh = self._allocate(needed) if self._can_give(needed + headroom) else None
        if fresh is None:
            self.cache.unlock(match.node)
            return False
        row = self.rows.allocate_row()
        assert row is not None, "available_rows was checked"
        sequence.row, sequence.node = row, match.node
        sequence.pages = [*match.pages, *fresh]
        sequence.owned = set(fresh)
        sequence.length_bound = sequence.computed = match.num_tokens
        self.rows.stage(row, 0, sequence.pages)
        if not sequence.retractions:
            sequence.cached_tokens = match.num_tokens
            self.queried_tokens += len(sequence.tokens)
            self.hit_tokens += match.num_tokens
        return True

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Make sure that a running sequence has pages for `length` tokens; False if there are none.

        Unlocked pages of the prefix cache are given up for it, the least recently used first.
        """
        needed = self._pages_for(length) - len(sequence.pages)
        if needed <= 0:
            return True
        fresh = self._allocate(needed)
        if fresh is None:
            return False
        assert sequence.row is not None, "a running sequence has a row"
        self.rows.stage(sequence.row, len(sequence.pages), fresh)
        sequence.pages += fresh
        sequence.owned.update(fresh)
        return True

    def share(self, sequence: Sequence) -> None:
        """Hand whole pages that processed steps filled to the prefix cache; keep reading them."""
        if not self._shares(sequence) or not sequence.proven_finite:
            return
        whole = sequence.computed // self.page_size
        pages = sequence.pages[:whole]
        if self.suspect:
            sound = next((at for at, page in enumerate(pages) if page in self.suspect), whole)
            if any(page not in sequence.owned for page in pages[sound:]):
                return  # it reads pages of the tree behind the suspect one, so its lock stays
            whole, pages = sound, pages[:sound]
        if not any(page in sequence.owned for page in pages):
            return
        tokens = sequence.tokens[: whole * self.page_size]
        result = self.cache.insert(self._key(sequence), tokens, pages)
        sequence.owned -= result.owned
        self.cache.lock(result.node)
        assert sequence.node is not None, "a sequence with a row holds a lock"
        self.cache.unlock(sequence.node)
        sequence.node = result.node

    def distrust(self, pages: Collection[int]) -> None:
        """Keep pages out of the prefix cache until they are written anew, and take them out of it
        where they are in it, with what follows them."""
        self.suspect.update(pages)
        self.cache.condemn(pages)

    def release(self, sequence: Sequence) -> None:
        """Take row and pages back; no launched step may name them any more."""
        assert sequence.in_flight == 0, "a row is freed after the last step that names it"
        if sequence.row is None:
            return
        self.share(sequence)
        assert sequence.node is not None, "a sequence with a row holds a lock"
        self.cache.unlock(sequence.node)
        self.allocator.free(sorted(sequence.owned))
        self.rows.free_row(sequence.row)
        sequence.row, sequence.node = None, None
        sequence.pages, sequence.owned = [], set()
        sequence.length_bound = sequence.computed = 0
        sequence.sampled_here = False

    def forget_request(self, sequence: Sequence) -> None:
        """Drop the namespace that the sequences of one request shared."""
        if not self.enable_prefix_cache:
            self.cache.drop(self._key(sequence))

    def check(self, scheduled: Iterable[Sequence]) -> None:
        """Every page in exactly one place, every lock and row accounted for, or an error."""
        holders = [sequence for sequence in scheduled if sequence.row is not None]
        check_integrity(
            self.allocator,
            self.cache,
            {holder.name: holder.owned for holder in holders},
            handles=[holder.node for holder in holders if holder.node is not None],
            rows=self.rows,
            live_rows=[holder.row for holder in holders if holder.row is not None],
        )

    def _allocate(self, count: int) -> list[int] | None:
        missing = count - self.allocator.available
        if missing > 0:
            self.cache.evict(missing)
        pages = self.allocator.allocate(count)
        if self.suspect and pages:
            self.suspect.difference_update(pages)
        return pages

    def _can_give(self, count: int) -> bool:
        return self.allocator.available + self.cache.evictable_pages >= count

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _shares(self, sequence: Sequence) -> bool:
        return self.enable_prefix_cache or sequence.request.params.n > 1

    def _key(self, sequence: Sequence) -> CacheKey:
        request = sequence.request
        salt = request.cache_salt if self.enable_prefix_cache else f"only {request.request_id}"
        return CacheKey(adapter=request.adapter, salt=salt, weights_version=self.weights_version)
