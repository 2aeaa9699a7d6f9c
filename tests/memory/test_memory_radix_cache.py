"""The radix cache, case by case."""

import time

import pytest

from headrace.memory.integrity import check_integrity
from headrace.memory.page_allocator import PageAllocator
from headrace.memory.radix_cache import InsertResult, RadixCache
from headrace.memory.radix_node import CacheKey, RadixNode

KEY = CacheKey()


class Tree:
    """A cache of 99 pages of 2 tokens, with what a test would otherwise repeat."""

    def __init__(self, page_size: int = 2) -> None:
        self.allocator = PageAllocator(100)
        self.cache = RadixCache(page_size, self.allocator)
        self.private: set[int] = set()
        self.handles: list[RadixNode] = []

    def insert(self, text: str, key: CacheKey = KEY) -> tuple[InsertResult, list[int]]:
        """Insert a prompt computed without a look into the cache; a letter is a token."""
        pages = self.allocator.allocate(len(text) // self.cache.page_size)
        assert pages is not None
        result = self.cache.insert(key, tokens(text), pages)
        self.private |= set(pages) - result.owned
        return result, pages

    def found(self, text: str, key: CacheKey = KEY) -> int:
        return self.cache.peek(key, tokens(text))

    def lock(self, text: str) -> RadixNode:
        node = self.cache.match(KEY, tokens(text)).node
        self.cache.lock(node)
        self.handles.append(node)
        return node

    def unlock(self, node: RadixNode) -> None:
        self.cache.unlock(node)
        self.handles.remove(node)

    def check(self) -> None:
        check_integrity(self.allocator, self.cache, {"test": self.private}, handles=self.handles)


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_an_empty_tree_matches_nothing_and_its_node_can_be_locked(tree: Tree) -> None:
    match = tree.cache.match(KEY, tokens("abcd"))
    assert (match.pages, match.num_tokens, match.node) == ((), 0, tree.cache.root)
    tree.cache.lock(match.node)
    tree.handles.append(match.node)
    tree.check()
    tree.unlock(match.node)
    assert tree.cache.evict(1) == 0


def test_match_returns_whole_pages_only(tree: Tree) -> None:
    _, pages = tree.insert("abcdef")
    for text, expected in [("a", 0), ("ab", 1), ("abc", 1), ("abcd", 2), ("abcdefgh", 3)]:
        match = tree.cache.match(KEY, tokens(text))
        assert match.pages == tuple(pages[:expected])
        assert match.num_tokens == 2 * expected
    tree.check()


def test_a_page_that_differs_in_its_last_token_is_not_matched(tree: Tree) -> None:
    tree.insert("abcdef")
    assert tree.cache.match(KEY, tokens("abcxef")).num_tokens == 2
    assert tree.found("axcdef") == 0


def test_tokens_may_be_any_sequence(tree: Tree) -> None:
    tree.insert("abcd")
    assert tree.cache.match(KEY, tuple(tokens("abcd"))).num_tokens == 4


def test_insert_refuses_part_of_a_page(tree: Tree) -> None:
    with pytest.raises(AssertionError, match="3 tokens do not fill 2 pages of 2"):
        tree.cache.insert(KEY, tokens("abc"), [1, 2])


def test_a_branch_splits_the_node_it_leaves(tree: Tree) -> None:
    tree.insert("abcdef")
    _, pages = tree.insert("abcdxy")
    assert [len(node.pages) for node in tree.cache.nodes()].count(1) == 2
    assert (tree.found("abcdef"), tree.found("abcdxy")) == (6, 6)
    # the duplicates of "abcd" stay with the caller
    assert tree.private == set(pages[:2])
    assert tree.cache.held_pages == 4
    tree.check()


def test_insert_reports_shared_pages_as_the_trees(tree: Tree) -> None:
    _, first = tree.insert("abcd")
    fresh = tree.allocator.allocate(1)
    assert fresh is not None
    result = tree.cache.insert(KEY, tokens("abcdef"), [*first, *fresh])
    assert result.owned == {*first, *fresh}
    assert result.node.pages == tuple(fresh)
    tree.check()


def test_inserting_again_takes_nothing_and_names_the_same_node(tree: Tree) -> None:
    first, _ = tree.insert("abcd")
    again, pages = tree.insert("abcd")
    assert again.node is first.node
    assert again.owned == frozenset()
    tree.allocator.free(pages)
    tree.private.clear()
    tree.check()


def test_inserting_a_prefix_ends_at_its_own_node(tree: Tree) -> None:
    tree.insert("abcdef")
    result, _ = tree.insert("ab")
    assert result.node.tokens == tuple(tokens("ab"))
    tree.check()


def test_a_handle_covers_the_same_pages_after_a_split(tree: Tree) -> None:
    _, pages = tree.insert("abcdef")
    node = tree.lock("abcdef")
    tree.cache.match(KEY, tokens("abxx"))
    assert node.pages == tuple(pages[1:])  # the lower half keeps the identity
    tree.check()
    assert tree.cache.evict(99) == 0
    assert tree.found("abcdef") == 6
    tree.unlock(node)
    tree.check()
    assert tree.cache.evict(99) == 3


def test_a_split_keeps_the_age(tree: Tree) -> None:
    tree.insert("abcd")
    tree.insert("xy")
    tree.insert("abpq")  # splits "abcd"; the part "cd" was last used before "xy"
    assert tree.cache.evict(1) == 1
    assert (tree.found("abcd"), tree.found("xy")) == (2, 2)


def test_locked_nodes_and_their_ancestors_stay(tree: Tree) -> None:
    tree.insert("abcdef")
    tree.insert("abcdxy")
    node = tree.lock("abcdxy")
    assert tree.cache.evictable_pages == 1
    assert tree.cache.evict(99) == 1
    assert (tree.found("abcdxy"), tree.found("abcdef")) == (6, 4)
    tree.unlock(node)
    assert tree.cache.evictable_pages == 3
    assert tree.cache.evict(99) == 3
    tree.check()


def test_two_locks_need_two_unlocks(tree: Tree) -> None:
    tree.insert("abcd")
    node = tree.lock("abcd")
    tree.lock("abcd")
    tree.unlock(node)
    assert tree.cache.evict(99) == 0
    tree.unlock(node)
    assert tree.cache.evict(99) == 2
    with pytest.raises(AssertionError, match="evicted before"):
        tree.cache.lock(node)


def test_unlocking_too_often_is_caught(tree: Tree) -> None:
    tree.insert("abcd")
    node = tree.lock("abcd")
    tree.unlock(node)
    with pytest.raises(AssertionError, match="not locked"):
        tree.cache.unlock(node)


def test_locking_an_evicted_match_is_caught(tree: Tree) -> None:
    tree.insert("abcdef")
    match = tree.cache.match(KEY, tokens("abcdef"))
    assert tree.cache.evict(1) == 1  # the node lost its end, so the match is no longer true
    with pytest.raises(AssertionError, match="evicted before"):
        tree.cache.lock(match.node)
    tree.check()


def test_the_least_recently_used_leaf_goes_first(tree: Tree) -> None:
    for text in ("aa", "bb", "cc"):
        tree.insert(text)
    tree.cache.match(KEY, tokens("aa"))
    tree.cache.peek(KEY, tokens("bb"))  # a look changes no age
    order = []
    for _ in range(3):
        before = {text for text in ("aa", "bb", "cc") if tree.found(text)}
        assert tree.cache.evict(1) == 1
        order += before - {text for text in before if tree.found(text)}
    assert order == ["bb", "cc", "aa"]


def test_children_go_before_their_parent_whatever_is_younger(tree: Tree) -> None:
    tree.insert("abcd")
    tree.insert("abxy")
    tree.cache.match(KEY, tokens("ab"))
    assert tree.cache.evict(2) == 2
    assert tree.found("abcd") == tree.found("abxy") == 2
    assert tree.cache.evict(2) == 1
    tree.check()


def test_eviction_takes_the_end_of_a_long_leaf_and_no_page_too_many(tree: Tree) -> None:
    _, pages = tree.insert("abcdefgh")
    assert tree.cache.evict(1) == 1
    assert tree.allocator.is_free(pages[3])
    assert tree.found("abcdefgh") == 6
    assert tree.cache.evict(2) == 2
    assert tree.found("abcdefgh") == 2
    tree.check()


def test_evicting_nothing_does_nothing(tree: Tree) -> None:
    tree.insert("abcd")
    assert tree.cache.evict(0) == 0
    assert tree.found("abcd") == 4


@pytest.mark.parametrize(
    "other",
    [CacheKey(adapter="poems"), CacheKey(salt="tenant"), CacheKey(weights_version=1)],
)
def test_namespaces_share_nothing(tree: Tree, other: CacheKey) -> None:
    tree.insert("abcd")
    assert tree.found("abcd", other) == 0
    result, pages = tree.insert("abcd", other)
    assert result.owned == set(pages)
    assert tree.cache.match(other, tokens("abcd")).pages == tuple(pages)
    tree.check()


def test_drop_empties_one_namespace_except_what_is_locked(tree: Tree) -> None:
    other = CacheKey(weights_version=1)
    tree.insert("abcdef")
    tree.insert("abxy")
    tree.insert("pqrs")
    tree.insert("abcd", other)
    node = tree.lock("abcd")
    assert tree.cache.drop(KEY) == 4
    assert (tree.found("abcdef"), tree.found("abxy"), tree.found("pqrs")) == (4, 2, 0)
    assert tree.found("abcd", other) == 4
    tree.check()
    tree.unlock(node)
    assert tree.cache.drop(KEY) == 2
    assert tree.cache.drop(KEY) == 0
    tree.check()


def test_clear_empties_everything_except_what_is_locked(tree: Tree) -> None:
    tree.insert("abcdef")
    tree.insert("pqrs", CacheKey(salt="tenant"))
    node = tree.lock("ab")
    assert tree.cache.clear() == 4
    assert tree.cache.held_pages == 1
    tree.check()
    tree.unlock(node)
    assert tree.cache.clear() == 1
    assert tree.allocator.available == tree.allocator.total
    assert tree.cache.evict(1) == 0


def test_the_eviction_queue_stays_as_small_as_the_tree(tree: Tree) -> None:
    tree.insert("abcd")
    tree.insert("abxy")
    for _ in range(100):
        tree.unlock(tree.lock("abcd"))
    assert len(tree.cache._queue) <= 3


def test_the_eviction_queue_forgets_what_was_dropped(tree: Tree) -> None:
    tree.insert("abcd")
    tree.insert("xy", CacheKey(salt="tenant"))
    tree.cache.drop(KEY)
    assert len(tree.cache._queue) == 1


@pytest.mark.parametrize("page_size", [1, 16])
def test_long_prompts_take_milliseconds(page_size: int) -> None:
    """10,000 tokens; about 1 ms is measured, what is quadratic takes seconds. Of this thread's own
    time: others may use the clock."""
    allocator = PageAllocator(10_000 // page_size + 1)
    cache = RadixCache(page_size, allocator)
    prompt = list(range(10_000))
    pages = allocator.allocate(10_000 // page_size)
    assert pages is not None
    seconds = []
    for operation in (
        lambda: cache.insert(KEY, prompt, pages),
        lambda: cache.match(KEY, prompt),
        lambda: cache.match(KEY, prompt[:5_000]),
    ):
        start = time.thread_time()
        operation()
        seconds.append(time.thread_time() - start)
    assert max(seconds) < 0.5
