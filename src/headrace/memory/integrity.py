"""The proof that memory is accounted for: every page in exactly one place, every lock owned.

For tests after random operations, and for an idle engine. Costs time linear in everything held.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping

from headrace.memory.page_allocator import PageAllocator
from headrace.memory.radix_cache import RadixCache
from headrace.memory.radix_node import RadixNode
from headrace.memory.req_to_token import ReqToTokenPool


class IntegrityError(AssertionError):
    """Two owners of a page, a page or row lost, or a tree that contradicts itself."""


def check_integrity(
    allocator: PageAllocator,
    cache: RadixCache,
    private_pages: Mapping[Hashable, Iterable[int]],
    *,
    handles: Iterable[RadixNode] = (),
    rows: ReqToTokenPool | None = None,
    live_rows: Collection[int] = (),
) -> None:
    """Check that free list, tree and sequences share out all pages, and the tree is sound.

    Args:
        allocator: the pages.
        cache: the tree.
        private_pages: owner -> the pages that it alone holds (those not of the tree).
        handles: every node that somebody has locked, once for each lock.
        rows: the row pool, if rows are to be checked.
        live_rows: the row of every scheduled sequence.

    Raises:
        IntegrityError: names the page and its owners, or the node or row that is wrong.
    """
    _check_pages(allocator, cache, private_pages)
    _check_tree(cache)
    _check_locks(cache, handles)
    if rows is not None:
        _check_rows(rows, live_rows)


def _check_pages(
    allocator: PageAllocator,
    cache: RadixCache,
    private_pages: Mapping[Hashable, Iterable[int]],
) -> None:
    holders: list[tuple[Hashable, Iterable[int]]] = [
        ("free list", allocator.free_pages()),
        *(("prefix cache", node.pages) for node in cache.nodes()),
        *private_pages.items(),
    ]
    owner_of: dict[int, Hashable] = {}
    for owner, pages in holders:
        for page in pages:
            if not 0 < page <= allocator.total:
                raise IntegrityError(f"{owner} holds page {page}, which no pool hands out")
            if page in owner_of:
                raise IntegrityError(f"page {page} belongs to {owner_of[page]} and to {owner}")
            if allocator.is_free(page) != (owner == "free list"):
                raise IntegrityError(f"page {page} of {owner} has the wrong mark in the allocator")
            owner_of[page] = owner
    if len(owner_of) != allocator.total:
        lost = sorted(set(range(1, allocator.total + 1)) - owner_of.keys())
        raise IntegrityError(f"{len(lost)} pages belong to nobody, such as {lost[:8]}")


def _check_tree(cache: RadixCache) -> None:
    held = evictable = 0
    for parent in (cache.root, *cache.nodes()):
        for edge, node in parent.children.items():
            _check_node(cache, parent, edge, node)
            held += len(node.pages)
            evictable += 0 if node.locks else len(node.pages)
    counted = (cache.held_pages, cache.evictable_pages)
    if counted != (held, evictable):
        raise IntegrityError(f"held and evictable pages are {held, evictable}, counted {counted}")


def _check_node(cache: RadixCache, parent: RadixNode, edge: object, node: RadixNode) -> None:
    problems = {
        "hangs on the wrong edge": edge != (node.key, node.tokens[: cache.page_size]),
        "has another parent": node.parent is not parent,
        "has no page": not node.pages,
        "has tokens for another number of pages": (
            len(node.tokens) != len(node.pages) * cache.page_size
        ),
        "lies in another namespace than its parent": (
            parent is not cache.root and parent.key != node.key
        ),
        "is younger than its parent": (
            parent is not cache.root and node.last_used > parent.last_used
        ),
        "can be evicted and is not queued": (
            not node.children and not node.locks and not node.is_queued
        ),
    }
    for problem, is_true in problems.items():
        if is_true:
            raise IntegrityError(f"the node of pages {node.pages[:4]} {problem}")


def _check_locks(cache: RadixCache, handles: Iterable[RadixNode]) -> None:
    expected: Counter[RadixNode] = Counter()
    for handle in handles:
        node: RadixNode | None = handle
        while node is not None:
            expected[node] += 1
            node = node.parent
    for node in (cache.root, *cache.nodes()):
        asked = expected.pop(node, 0)
        if node.locks != asked:
            raise IntegrityError(
                f"the node of pages {node.pages[:4]} counts {node.locks} locks, {asked} are held"
            )
    for node in expected:
        raise IntegrityError(f"the node of pages {node.pages[:4]} is locked but not in the tree")


def _check_rows(rows: ReqToTokenPool, live_rows: Collection[int]) -> None:
    if len(set(live_rows)) != len(live_rows):
        raise IntegrityError(f"two sequences share a row: {sorted(live_rows)}")
    if rows.live_rows != set(live_rows):
        wrong = sorted(rows.live_rows ^ set(live_rows))
        raise IntegrityError(f"rows {wrong} are taken without a sequence, or the other way round")
    if rows.available_rows + len(rows.live_rows) != rows.num_rows - 1:
        raise IntegrityError(f"{rows.available_rows} rows are free, {len(rows.live_rows)} taken")
