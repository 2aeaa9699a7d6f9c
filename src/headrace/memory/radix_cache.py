"""The prefix cache: a radix tree whose edges are whole pages of tokens.

The idea of a radix tree over KV with reference counts and LRU leaves is SGLang's (Zheng et al.,
"SGLang: Efficient Execution of Structured Language Model Programs", 2024). The tree holds page
numbers only; the scheduler owns it and no tensor is touched here.

Ownership of a page passes one way: a sequence computes it, `insert` takes it over, `evict` gives
it back to the allocator. A sequence that reads pages of the tree holds a lock on the deepest node
it reads, and a locked node and all its ancestors stay.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne

from headrace.memory.eviction_queue import EvictionQueue
from headrace.memory.page_allocator import PageAllocator
from headrace.memory.radix_node import CacheKey, EdgeKey, RadixNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest cached prefix. Its pages are safe to read once `node` is locked."""

    pages: tuple[int, ...]
    num_tokens: int
    node: RadixNode


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertResult:
    """What `insert` did with the caller's pages.

    `node` covers exactly the inserted tokens. `owned` are those of the caller's pages that now
    belong to the tree; the others are duplicates of pages that it held already, and stay the
    caller's to read, keep and free.
    """

    node: RadixNode
    owned: frozenset[int]


class RadixCache:
    """Prefixes of token ids, in whole pages, to the pages that hold their KV.

    Time is a counter of operations and not a clock, so that ranks agree on what is oldest.
    """

    def __init__(self, page_size: int, allocator: PageAllocator) -> None:
        self.page_size = page_size
        self._allocator = allocator
        self._time = 0
        self._births = 0
        self.root = self._new_node(key=None, tokens=(), pages=(), parent=None)
        self._held_pages = 0
        self._evictable_pages = 0
        self._queue = EvictionQueue()

    @property
    def held_pages(self) -> int:
        """Pages that belong to the tree."""
        return self._held_pages

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could give back now: those of unlocked nodes."""
        return self._evictable_pages

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root, parents before children."""
        return self._subtree(self.root.children.values())

    # ---- looking up

    def peek(self, key: CacheKey, tokens: Sequence[int]) -> int:
        """How many tokens `match` would find. Changes nothing: no age, no split."""
        return sum(shared for _, shared in self._path(key, tuple(tokens))) * self.page_size

    def match(self, key: CacheKey, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of `tokens` in whole pages.

        The caller cuts `tokens` to what it may take from the cache first. The match ends where a
        node ends, if need be by a split, so that locking `node` holds these pages and no others.
        Lock it before anything is evicted.
        """
        node, pages = self._walk(key, tuple(tokens))
        return Match(pages=tuple(pages), num_tokens=len(pages) * self.page_size, node=node)

    def _path(self, key: CacheKey, tokens: tuple[int, ...]) -> Iterator[tuple[RadixNode, int]]:
        """Nodes that share pages with `tokens`, root side first, with the number of pages shared.

        The last one may be shared in part; it may be split while the iterator stands on it.
        """
        node, start = self.root, 0
        while child := node.children.get((key, tokens[start : start + self.page_size])):
            if child.is_condemned:
                return
            shared = self._shared_pages(child, tokens, start)
            is_whole = shared == len(child.pages)
            yield child, shared
            if not is_whole:
                return
            node, start = child, start + len(child.tokens)

    def _shared_pages(self, node: RadixNode, tokens: tuple[int, ...], start: int) -> int:
        others = tokens[start : start + len(node.tokens)]
        if others == node.tokens:
            return len(node.pages)
        length = min(len(others), len(node.tokens))
        first_difference = next(compress(count(), map(ne, others, node.tokens)), length)
        return first_difference // self.page_size

    def _walk(self, key: CacheKey, tokens: tuple[int, ...]) -> tuple[RadixNode, list[int]]:
        """Go down as far as `tokens` are held, making the path young and the end a node's end."""
        self._time += 1
        node = self.root
        pages: list[int] = []
        for child, shared in self._path(key, tokens):
            node = child if shared == len(child.pages) else self._split(child, shared)
            node.last_used = self._time
            pages.extend(node.pages)
        return node, pages

    # ---- taking over

    def insert(self, key: CacheKey, tokens: Sequence[int], pages: Sequence[int]) -> InsertResult:
        """Hand computed pages over to the tree.

        Args:
            key: the namespace.
            tokens: whole pages of tokens, from position 0.
            pages: the page of every `page_size` tokens; those that were matched before are the
                tree's own numbers, and their node must still be locked.
        """
        tokens = tuple(tokens)
        if len(tokens) != len(pages) * self.page_size:
            raise AssertionError(
                f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}"
            )
        node, held = self._walk(key, tokens)
        rest, fresh = tokens[len(held) * self.page_size :], tuple(pages[len(held) :])
        if (key, rest[: self.page_size]) in node.children:
            fresh = ()  # the place is that of a condemned node until it goes
        if fresh:
            node = self._add_leaf(key, node, rest, fresh)
        known = (mine for mine, theirs in zip(pages, held, strict=False) if mine == theirs)
        return InsertResult(node=node, owned=frozenset((*known, *fresh)))

    def _add_leaf(
        self, key: CacheKey, parent: RadixNode, tokens: tuple[int, ...], pages: tuple[int, ...]
    ) -> RadixNode:
        leaf = self._new_node(key=key, tokens=tokens, pages=pages, parent=parent)
        parent.children[self._edge(leaf)] = leaf
        self._held_pages += len(pages)
        self._evictable_pages += len(pages)
        self._queue.add(leaf)
        return leaf

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Cut a node in two; return the upper half, which holds its first `num_pages` pages.

        The lower half keeps the identity. A sequence that locked the node reads all of its pages,
        and from the lower half the path to the root still runs over all of them; for the same
        reason the upper half starts with the same number of locks. The children need not be told.
        """
        cut = num_pages * self.page_size
        parent = _present(node.parent)
        upper = self._new_node(
            key=node.key, tokens=node.tokens[:cut], pages=node.pages[:num_pages], parent=parent
        )
        upper.last_used, upper.locks = node.last_used, node.locks
        upper.is_condemned = node.is_condemned
        parent.children[self._edge(upper)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[num_pages:], upper
        upper.children[self._edge(node)] = node
        return upper

    # ---- holding

    def lock(self, node: RadixNode) -> None:
        """Keep a node and all its ancestors until the matching `unlock`."""
        for above in self._to_root(node):
            if above.locks == 0:
                self._evictable_pages -= len(above.pages)
            above.locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Take back one `lock` of this node."""
        gone = []
        for above in self._to_root(node):
            if above.locks == 0:
                raise AssertionError(f"the node of pages {above.pages[:4]} is not locked")
            above.locks -= 1
            if above.locks == 0:
                self._evictable_pages += len(above.pages)
                self._queue.add(above)
                if above.is_condemned:
                    gone.append(above)
        if gone:
            self._remove_unlocked(gone[-1:])  # the highest of them, with what hangs below it

    def _to_root(self, node: RadixNode) -> Iterator[RadixNode]:
        while node is not self.root:
            if node.parent is None:
                raise AssertionError(f"the node of pages {node.pages[:4]} was evicted before")
            yield node
            node = node.parent
        yield node

    # ---- giving back

    def evict(self, num_pages: int) -> int:
        """Give back the least recently used unlocked pages; return how many.

        Leaves go first, the end of a long one before its beginning, and never more than
        `num_pages`. Fewer go back only where `evictable_pages` was smaller.
        """
        freed = 0
        while freed < num_pages and (leaf := self._queue.take_oldest()) is not None:
            kept = len(leaf.pages) - (num_pages - freed)
            if kept > 0:
                self._split(leaf, kept)
            freed += self._remove(leaf)
        return freed

    def drop(self, key: CacheKey) -> int:
        """Give back everything unlocked of one namespace; return the number of pages."""
        return self._remove_unlocked(
            child for (owner, _), child in self.root.children.items() if owner == key
        )

    def clear(self) -> int:
        """Give back everything unlocked; return the number of pages."""
        return self._remove_unlocked(self.root.children.values())

    def condemn(self, pages: Collection[int]) -> None:
        """Let nobody match these pages any more, nor what follows them; others are left alone.

        They are given back at once where no sequence reads them, else when the last one is done.
        """
        for node in tuple(self.nodes()):
            first = next((at for at, page in enumerate(node.pages) if page in pages), None)
            is_removed = node.parent is None
            if first is None or is_removed or node.is_condemned:
                continue
            if first:
                self._split(node, first)
            node.is_condemned = True
            if not node.locks:
                self._remove_unlocked([node])

    def held_runs(self) -> Iterator[tuple[int, int, int]]:
        """Every page that can be matched: the page before it, the page, its index in the sequence.

        The first page of a sequence has itself before it.
        """
        ahead = [(node, 0, 0) for node in self.root.children.values()]
        while ahead:
            node, before, index = ahead.pop()
            if node.is_condemned:
                continue
            for page in node.pages:
                yield before or page, page, index
                before, index = page, index + 1
            ahead += [(child, before, index) for child in node.children.values()]

    def _remove_unlocked(self, tops: Iterable[RadixNode]) -> int:
        parents_first = list(self._subtree(tops))
        freed = sum(self._remove(node) for node in reversed(parents_first) if node.locks == 0)
        self._queue.forget_removed()
        return freed

    def _remove(self, leaf: RadixNode) -> int:
        if leaf.children or leaf.locks:
            raise AssertionError(f"the node of pages {leaf.pages[:4]} is in use")
        parent = _present(leaf.parent)
        del parent.children[self._edge(leaf)]
        leaf.parent = None
        self._held_pages -= len(leaf.pages)
        self._evictable_pages -= len(leaf.pages)
        self._allocator.free(leaf.pages)
        self._queue.add(parent)
        return len(leaf.pages)

    # ---- the tree

    def _subtree(self, tops: Iterable[RadixNode]) -> Iterator[RadixNode]:
        ahead = list(tops)
        while ahead:
            node = ahead.pop()
            yield node
            ahead.extend(node.children.values())

    def _edge(self, node: RadixNode) -> EdgeKey:
        return node.key, node.tokens[: self.page_size]

    def _new_node(
        self,
        *,
        key: CacheKey | None,
        tokens: tuple[int, ...],
        pages: tuple[int, ...],
        parent: RadixNode | None,
    ) -> RadixNode:
        self._births += 1
        return RadixNode(
            key=key,
            tokens=tokens,
            pages=pages,
            parent=parent,
            last_used=self._time,
            serial=self._births,
        )


def _present(parent: RadixNode | None) -> RadixNode:
    if parent is None:
        raise AssertionError("a node that was evicted, or the root, has no parent")
    return parent
