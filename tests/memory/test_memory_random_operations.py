"""Random lives of sequences over allocator, prefix cache and rows, against a model.

The test writes into every slot a hash of the whole prefix that the slot stands for, as KV would.
Two sequences that write one page, a page reused too early and a match that goes too far all show
up as a slot with another prefix in it.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from headrace.memory.arena import Arena
from headrace.memory.integrity import check_integrity
from headrace.memory.page_allocator import PageAllocator
from headrace.memory.radix_cache import RadixCache
from headrace.memory.radix_node import CacheKey, RadixNode
from headrace.memory.req_to_token import ReqToTokenPool

OPERATIONS = 10_000
POOL_PAGES = 41
LONGEST = 8  # pages
NAMESPACES = (
    CacheKey(),
    CacheKey(adapter="poems"),
    CacheKey(salt="tenant"),
    CacheKey(weights_version=1),
)


@dataclass(eq=False, kw_only=True)
class Life:
    key: CacheKey
    tokens: list[int]
    row: int
    node: RadixNode
    pages: list[int]
    private: set[int]
    hashes: list[int] = field(default_factory=list)  # of the prefix that ends at each position


class World:
    def __init__(self, page_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        self.allocator = PageAllocator(POOL_PAGES)
        self.cache = RadixCache(page_size, self.allocator)
        self.rows = ReqToTokenPool(Arena("cpu"), num_rows=9, max_pages=LONGEST, groups=("full",))
        self.memory = [0] * (POOL_PAGES * page_size)
        self.model: dict[tuple[CacheKey, int], int] = {}  # prefix of whole pages -> page
        self.live: list[Life] = []
        self.waiting: list[tuple[CacheKey, list[int]]] = []
        self.documents = [
            [self.random.randrange(3) for _ in range(page_size * LONGEST)] for _ in range(3)
        ]
        self.done: Counter[str] = Counter()

    # ---- the model

    def hashes(self, key: CacheKey, tokens: list[int], before: int | None = None) -> list[int]:
        last = hash(key) if before is None else before
        result = []
        for token in tokens:
            last = hash((last, token))
            result.append(last)
        return result

    def expected_match(self, key: CacheKey, tokens: list[int]) -> tuple[int, ...]:
        pages = []
        for prefix in self.hashes(key, tokens)[self.page_size - 1 :: self.page_size]:
            page = self.model.get((key, prefix))
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def forget_freed(self) -> None:
        self.model = {
            prefix: page for prefix, page in self.model.items() if not self.allocator.is_free(page)
        }

    def check(self) -> None:
        check_integrity(
            self.allocator,
            self.cache,
            {id(life): life.private for life in self.live},
            handles=[life.node for life in self.live],
            rows=self.rows,
            live_rows=[life.row for life in self.live],
        )

    def check_content(self, life: Life) -> None:
        found = [
            self.memory[life.pages[at // self.page_size] * self.page_size + at % self.page_size]
            for at in range(len(life.tokens))
        ]
        assert found == life.hashes

    # ---- what a scheduler does

    def evict(self, pages: int) -> None:
        could = self.cache.evictable_pages
        assert self.cache.evict(pages) == min(pages, could)
        self.done["evicted pages"] += min(pages, could)
        self.forget_freed()

    def take_pages(self, count: int) -> list[int] | None:
        pages = self.allocator.allocate(count)
        if pages is None:
            self.evict(count - self.allocator.available)
            pages = self.allocator.allocate(count)
        return pages

    def start(self, key: CacheKey, tokens: list[int]) -> bool:
        row = self.rows.allocate_row()
        if row is None:
            return False
        expected = self.expected_match(key, tokens[:-1])
        assert self.cache.peek(key, tokens[:-1]) == len(expected) * self.page_size
        match = self.cache.match(key, tokens[:-1])
        assert match.pages == expected
        assert match.num_tokens == len(expected) * self.page_size
        self.done["cached tokens"] += match.num_tokens
        self.cache.lock(match.node)
        fresh = self.take_pages(-(-len(tokens) // self.page_size) - len(expected))
        if fresh is None:
            self.cache.unlock(match.node)
            self.rows.free_row(row)
            return False
        life = Life(key=key, tokens=[], row=row, node=match.node, pages=[*expected], private=set())
        life.tokens = tokens[: match.num_tokens]
        life.hashes = self.hashes(key, life.tokens)
        self.check_content(life)  # the cache gave what this prefix needs
        life.pages += fresh
        life.private.update(fresh)
        self.live.append(life)
        for token in tokens[match.num_tokens :]:
            self.write(life, token)
        return True

    def write(self, life: Life, token: int) -> None:
        at = len(life.tokens)
        page = life.pages[at // self.page_size]
        assert page in life.private, "a page of the tree must never be written"
        before = life.hashes[-1] if life.hashes else None
        life.hashes += self.hashes(life.key, [token], before)
        life.tokens.append(token)
        self.memory[page * self.page_size + at % self.page_size] = life.hashes[-1]

    def insert(self, life: Life) -> None:
        whole = len(life.tokens) // self.page_size
        ends = life.hashes[self.page_size - 1 :: self.page_size]
        result = self.cache.insert(
            life.key, life.tokens[: whole * self.page_size], life.pages[:whole]
        )
        expected = set()
        for prefix, page in zip(ends, life.pages, strict=False):
            if self.model.setdefault((life.key, prefix), page) == page:
                expected.add(page)
        assert result.owned == expected
        life.private -= result.owned
        self.cache.lock(result.node)
        self.cache.unlock(life.node)
        life.node = result.node

    def end(self, life: Life, *, keep: bool) -> None:
        self.check_content(life)
        if keep:
            self.insert(life)
        self.live.remove(life)
        self.allocator.free(sorted(life.private))
        self.cache.unlock(life.node)
        self.rows.free_row(life.row)

    # ---- one random operation

    def operate(self) -> None:
        kinds = {
            self.arrive: 4,
            self.resume: 2,
            self.decode: 8,
            self.hand_over: 3,
            self.finish: 2,
            self.abort: 1,
            self.retract: 1,
            self.fork: 2,
            self.make_room: 1,
            self.drop_namespace: 0.1,
            self.clear: 0.05,
        }
        operation = self.random.choices([*kinds], [*kinds.values()])[0]
        if operation():
            self.done[operation.__name__] += 1

    def any_life(self) -> Life | None:
        return self.random.choice(self.live) if self.live else None

    def arrive(self) -> bool:
        key = self.random.choice(NAMESPACES)
        length = self.random.randint(1, self.page_size * (LONGEST - 1))
        tokens = self.random.choice(self.documents)[:length]
        if self.random.random() < 0.5:
            tokens = tokens[: self.random.randint(0, length)]
            tokens += [self.random.randrange(3) for _ in range(length - len(tokens))]
        return self.start(key, tokens)

    def resume(self) -> bool:
        if not self.waiting or not self.start(*self.waiting[0]):
            return False
        self.waiting.pop(0)
        return True

    def decode(self) -> bool:
        life = self.any_life()
        if life is None or len(life.tokens) == self.page_size * LONGEST:
            return False
        for _ in range(self.random.randint(1, 2 * self.page_size)):
            if len(life.tokens) == self.page_size * LONGEST:
                break
            if len(life.tokens) == len(life.pages) * self.page_size:
                fresh = self.take_pages(1)
                if fresh is None:
                    self.waiting.append((life.key, life.tokens))
                    self.end(life, keep=True)
                    break
                life.pages += fresh
                life.private.update(fresh)
            self.write(life, self.random.randrange(3))
        return True

    def hand_over(self) -> bool:
        life = self.any_life()
        if life:
            self.insert(life)
        return life is not None

    def finish(self) -> bool:
        life = self.any_life()
        if life:
            self.end(life, keep=True)
        return life is not None

    def abort(self) -> bool:
        life = self.any_life()
        if life:
            self.end(life, keep=False)
        return life is not None

    def retract(self) -> bool:
        life = self.any_life()
        if life:
            self.waiting.append((life.key, life.tokens))
            self.end(life, keep=self.random.random() < 0.5)
        return life is not None

    def fork(self) -> bool:
        life = self.any_life()
        if life is None:
            return False
        self.insert(life)
        return self.start(life.key, list(life.tokens))

    def make_room(self) -> bool:
        self.evict(self.random.randint(0, 12))
        return True

    def drop_namespace(self) -> bool:
        self.cache.drop(self.random.choice(NAMESPACES))
        self.forget_freed()
        return True

    def clear(self) -> bool:
        self.cache.clear()
        self.forget_freed()
        return True


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_random_lives_keep_every_page_in_one_place(page_size: int) -> None:
    world = World(page_size, seed=page_size)
    for _ in range(OPERATIONS):
        world.operate()
        world.check()
        life = world.any_life()
        if life:
            world.check_content(life)
    # every kind of operation took effect, so that none of the checks above was idle
    assert min(world.done[name] for name in ("fork", "resume", "retract", "abort")) > 100
    assert min(world.done[name] for name in ("drop_namespace", "clear")) > 5
    assert min(world.done["cached tokens"], world.done["evicted pages"]) > 1000
    for life in [*world.live]:
        world.end(life, keep=True)
    assert world.cache.evictable_pages == world.cache.held_pages
    world.cache.clear()
    world.check()
    assert world.allocator.available == world.allocator.total
