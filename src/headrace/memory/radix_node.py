"""The nodes of the prefix cache, and what tells its namespaces apart."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """The namespace of a prefix: equal tokens give equal KV only where all of this is equal too.

    `adapter` is the LoRA adapter, `salt` a secret that keeps tenants apart, `weights_version`
    counts weight updates.
    """

    adapter: str | None = None
    salt: str = ""
    weights_version: int = 0


EdgeKey = tuple[CacheKey | None, tuple[int, ...]]


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class RadixNode:
    """A run of pages that every holder of the node reads, and the handle that sequences lock.

    `tokens` and `pages` are the node's own run only: `len(tokens) == len(pages) * page_size`.
    `locks` counts the locks of this node and of all its descendants. A condemned node is matched by
    nobody any more, nor is what hangs below it; it goes when its last lock does.
    """

    key: CacheKey | None  # None: the root
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    parent: "RadixNode | None"  # None: the root, or a node that was evicted
    last_used: int
    serial: int  # order of birth, which breaks ties of last_used the same way on every rank
    children: dict[EdgeKey, "RadixNode"] = field(default_factory=dict)
    locks: int = 0
    is_queued: bool = False
    is_condemned: bool = False

    @property
    def is_evictable(self) -> bool:
        """A leaf that nobody reads."""
        return self.parent is not None and not self.children and self.locks == 0
