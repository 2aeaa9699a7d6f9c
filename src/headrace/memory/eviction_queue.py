"""Which leaf of the prefix cache was used least recently."""

import heapq

from headrace.memory.radix_node import RadixNode


class EvictionQueue:
    """Unlocked leaves by age.

    An entry may be out of date, but a node has at most one: matching costs no heap operation, and
    the heap stays as small as the tree.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, RadixNode]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: RadixNode) -> None:
        """A node may have become evictable."""
        if node.is_evictable and not node.is_queued:
            heapq.heappush(self._entries, (node.last_used, node.serial, node))
            node.is_queued = True

    def take_oldest(self) -> RadixNode | None:
        """The oldest unlocked leaf, taken from the queue.

        An entry whose node got locked, got children or was removed is dropped: the node is queued
        again when that ends. One whose node was used since goes back with its new age.
        """
        while self._entries:
            queued_at, _, node = heapq.heappop(self._entries)
            node.is_queued = False
            if node.is_evictable:
                if node.last_used == queued_at:
                    return node
                self.add(node)
        return None

    def forget_removed(self) -> None:
        """Entries of removed nodes would keep their tokens alive until an eviction met them."""
        self._entries = [entry for entry in self._entries if entry[2].parent is not None]
        heapq.heapify(self._entries)
