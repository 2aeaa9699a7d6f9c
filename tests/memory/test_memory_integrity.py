"""`check_integrity` accepts sound memory and names what is wrong in damaged memory."""

from collections.abc import Callable

import pytest

from headrace.memory.arena import Arena
from headrace.memory.integrity import IntegrityError, check_integrity
from headrace.memory.page_allocator import PageAllocator
from headrace.memory.radix_cache import RadixCache
from headrace.memory.radix_node import CacheKey, RadixNode
from headrace.memory.req_to_token import ReqToTokenPool


class House:
    """Six pages: 1 and 2 with sequence "a", 3 to 5 in the tree (3 4 and 5 below 3), 6 free."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(7)
        self.cache = RadixCache(1, self.allocator)
        self.private = {"a": self.allocator.allocate(2) or []}
        pages = self.allocator.allocate(3) or []
        self.cache.insert(CacheKey(), [10, 11], pages[:2])
        self.leaf = self.cache.insert(CacheKey(), [10, 12], [pages[0], pages[2]]).node
        self.cache.lock(self.leaf)
        self.handles = [self.leaf]
        self.rows = ReqToTokenPool(Arena("cpu"), num_rows=3, max_pages=2, groups=("full",))
        self.live_rows = [self.rows.allocate_row() or 0]

    @property
    def upper(self) -> RadixNode:
        assert self.leaf.parent is not None
        return self.leaf.parent

    def check(self) -> None:
        check_integrity(
            self.allocator,
            self.cache,
            self.private,
            handles=self.handles,
            rows=self.rows,
            live_rows=self.live_rows,
        )


def test_sound_memory_passes() -> None:
    House().check()


def _unlink_last_leaf(house: House) -> None:
    house.upper.children.popitem()


DAMAGES: dict[str, tuple[Callable[[House], object], str]] = {
    "two owners": (lambda h: h.private.update(b=[2]), "page 2 belongs to a and to b"),
    "tree and sequence": (
        lambda h: h.private.update(b=[5]),
        "page 5 belongs to prefix cache and to b",
    ),
    "freed but kept": (
        lambda h: h.allocator.free([1]),
        "page 1 belongs to free list and to a",
    ),
    "same owner twice": (lambda h: h.private["a"].append(1), "page 1 belongs to a and to a"),
    "lost": (lambda h: h.private["a"].remove(1), r"1 pages belong to nobody, such as \[1\]"),
    "padding page owned": (lambda h: h.private["a"].append(0), "a holds page 0"),
    "outside the pool": (lambda h: h.private["a"].append(7), "a holds page 7"),
    "wrong mark": (lambda h: h.allocator._is_taken.__setitem__(1, 0), "wrong mark"),
    "a lock lost": (lambda h: setattr(h.leaf, "locks", 0), "evictable pages are"),
    "a lock too many": (lambda h: h.cache.lock(h.leaf), "counts 2 locks, 1 are held"),
    "a handle without lock": (lambda h: h.handles.append(h.leaf), "counts 1 locks, 2 are held"),
    "a handle that is gone": (
        lambda h: h.handles.append(h.cache._new_node(key=None, tokens=(), pages=(9,), parent=None)),
        "locked but not in the tree",
    ),
    "wrong edge": (lambda h: setattr(h.leaf, "tokens", (13,)), "wrong edge"),
    "wrong parent": (lambda h: setattr(h.leaf, "parent", h.cache.root), "another parent"),
    "tokens and pages differ": (
        lambda h: setattr(h.leaf, "tokens", (12, 13)),
        "another number of pages",
    ),
    "younger than parent": (lambda h: setattr(h.leaf, "last_used", 99), "younger"),
    "not queued": (
        lambda h: [setattr(node, "is_queued", False) for node in h.cache.nodes()],
        "not queued",
    ),
    "counter": (lambda h: setattr(h.cache, "_held_pages", 9), "counted"),
    "node unlinked": (_unlink_last_leaf, "belong to nobody"),
    "row without sequence": (lambda h: h.live_rows.clear(), r"rows \[1\] are taken"),
    "sequence without row": (lambda h: h.live_rows.append(2), r"rows \[2\] are taken"),
    "row shared": (lambda h: h.live_rows.append(1), "share a row"),
    "row lost": (lambda h: h.rows._free.clear(), "0 rows are free, 1 taken"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str) -> None:
    house = House()
    damage, message = DAMAGES[name]
    damage(house)
    with pytest.raises(IntegrityError, match=message):
        house.check()


def test_a_child_of_another_namespace_is_named() -> None:
    house = House()
    leaf, other = house.leaf, CacheKey(salt="tenant")
    del house.upper.children[(leaf.key, leaf.tokens)]
    leaf.key = other
    house.upper.children[(other, leaf.tokens)] = leaf
    with pytest.raises(IntegrityError, match="another namespace"):
        house.check()
