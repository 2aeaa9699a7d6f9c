"""Pages that hold what they should not: nobody matches them, and they come back in the end."""

import random

import pytest

from headrace.memory.integrity import check_integrity
from headrace.memory.page_allocator import PageAllocator
from headrace.memory.radix_cache import RadixCache
from headrace.memory.radix_node import CacheKey, RadixNode

KEY = CacheKey()


def cache_with(*texts: str) -> tuple[RadixCache, dict[str, list[int]]]:
    """A letter is a token and a page."""
    cache, pages = RadixCache(1, PageAllocator(60)), {}
    for text in texts:
        match = cache.match(KEY, tokens(text))
        cache.lock(match.node)
        fresh = cache._allocator.allocate(len(text) - match.num_tokens)
        assert fresh is not None
        pages[text] = [*match.pages, *fresh]
        cache.insert(KEY, tokens(text), pages[text])
        cache.unlock(match.node)
    return cache, pages


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_what_stands_before_stays_and_what_follows_goes() -> None:
    cache, pages = cache_with("abcdef", "abcxyz", "qrs")
    cache.condemn({pages["abcdef"][1]})
    assert cache.peek(KEY, tokens("abcdef")) == cache.peek(KEY, tokens("abcxyz")) == 1
    assert cache.peek(KEY, tokens("qrs")) == 3
    assert cache.held_pages == 4
    check_integrity(cache._allocator, cache, {})
    cache.condemn({59})  # not the tree's
    assert cache.held_pages == 4


def test_a_reader_keeps_it_until_it_is_done() -> None:
    cache, pages = cache_with("abcdef", "abcxyz")
    node = cache.match(KEY, tokens("abcd")).node
    cache.lock(node)
    cache.condemn({pages["abcdef"][2]})
    assert cache.peek(KEY, tokens("abcdef")) == 2
    assert cache.held_pages == 9
    check_integrity(cache._allocator, cache, {}, handles=[node])
    # Its place is taken until it goes: a new computation of it stays its owner's.
    fresh = cache._allocator.allocate(4)
    assert fresh is not None
    result = cache.insert(KEY, tokens("abcdef"), [*pages["abcdef"][:2], *fresh])
    assert result.owned == frozenset(pages["abcdef"][:2])
    check_integrity(cache._allocator, cache, {"owner": fresh}, handles=[node])
    cache.unlock(node)
    assert cache.held_pages == 2
    check_integrity(cache._allocator, cache, {"owner": fresh})
    assert cache.insert(KEY, tokens("abcdef"), [*pages["abcdef"][:2], *fresh]).owned == frozenset(
        [*pages["abcdef"][:2], *fresh]
    )
    assert cache.peek(KEY, tokens("abcdef")) == 6


def test_runs_name_each_page_with_the_one_before_it() -> None:
    cache, pages = cache_with("abcd", "abxy", "q")
    expected = set()
    for held in pages.values():
        before = held[0]
        for index, page in enumerate(held):
            expected.add((before, page, index))
            before = page
    assert set(cache.held_runs()) == expected
    node = cache.match(KEY, tokens("abxy")).node
    cache.lock(node)
    cache.condemn({pages["abxy"][2]})
    assert set(cache.held_runs()) == {run for run in expected if run[1] not in pages["abxy"][2:]}, (
        "what nobody matches is swept no more"
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_lives(seed: int) -> None:
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 3])
    allocator = PageAllocator(50)
    cache = RadixCache(page_size, allocator)
    condemned: set[int] = set()
    locked: list[tuple[RadixNode, set[int]]] = []
    private: dict[int, list[int]] = {}
    for number in range(400):
        prompt = [draw.randrange(2) for _ in range(page_size * draw.randint(1, 6))]
        action = draw.random()
        if action < 0.5:
            match = cache.match(KEY, prompt)
            assert not condemned & set(match.pages)
            cache.lock(match.node)
            needed = len(prompt) // page_size - len(match.pages)
            cache.evict(max(0, needed - allocator.available))
            fresh = allocator.allocate(needed)
            if fresh is None:
                cache.unlock(match.node)
                continue
            condemned -= set(fresh)
            pages = [*match.pages, *fresh]
            result = cache.insert(KEY, prompt, pages)
            cache.lock(result.node)
            cache.unlock(match.node)
            private[number] = [page for page in fresh if page not in result.owned]
            locked.append((result.node, set(pages)))
        elif action < 0.8 and locked:
            node, _ = locked.pop(draw.randrange(len(locked)))
            cache.unlock(node)
        elif action < 0.9 and private:
            allocator.free(private.pop(draw.choice(list(private))))
        else:
            held = [page for _, page, _ in cache.held_runs()]
            chosen = set(draw.sample(held, min(len(held), 2)))
            cache.condemn(chosen)
            assert not chosen & {page for _, page, _ in cache.held_runs()}
            condemned |= chosen
        handles = [node for node, _ in locked]
        check_integrity(allocator, cache, private, handles=handles)
    for node, _ in locked:
        cache.unlock(node)
    cache.clear()
    for pages in private.values():
        allocator.free(pages)
    assert allocator.available == allocator.total
