"""What paths share that capture a graph for each bucket, at need or when there is time."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Generic, TypeVar

from tqdm import tqdm

from headrace.batch.facts import Bucket
from headrace.execution.path import CaptureReport

Captured = TypeVar("Captured")


class CapturesBuckets(ABC, Generic[Captured]):
    """Keeps what was captured, and what that cost.

    Args:
        buckets: those that may be captured ahead, in ascending order.
    """

    name: str

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        self._captured: dict[Bucket, Captured] = {}
        self._report = CaptureReport(seconds={}, bytes={})

    @abstractmethod
    def capture(self, bucket: Bucket) -> None:
        """Capture one bucket. The forward stream is drained first; live rows are not touched."""

    def prepare(self) -> CaptureReport:
        """What has been captured so far; buckets are captured at need."""
        return self._report

    @property
    def title(self) -> str:
        """Its graphs, in words."""
        return f"{self.name.replace('_', ' ')}s"

    def capture_largest(self) -> int:
        """Capture the largest bucket; the bytes that it holds."""
        bucket = self._buckets[-1]
        self.capture(bucket)
        return self._report.bytes[bucket]

    def capture_all(self, *, progress: bool = False) -> None:
        """Capture every bucket, the largest first: later ones fit into its memory.

        Args:
            progress: show a bar.
        """
        desc = f"Capturing {self.title}"
        for bucket in tqdm(self._buckets[::-1], desc=desc, disable=not progress):
            if bucket not in self._captured:
                self.capture(bucket)

    def prepare_more(self) -> bool:
        """Capture one bucket that is missing; False: there is none."""
        bucket = next_missing(self._buckets, self._captured)
        if bucket is not None:
            self.capture(bucket)
        return bucket is not None

    def _keep(self, bucket: Bucket, captured: Captured, *, seconds: float, size: int) -> None:
        """Keep a capture that took so long and holds `size` bytes."""
        self._captured[bucket] = captured
        self._report.seconds[bucket], self._report.bytes[bucket] = seconds, size

    def _so_far(self) -> str:
        """How many of the buckets are captured, for the log."""
        count = sum(bucket in self._captured for bucket in self._buckets)
        return f"{count} of {len(self._buckets)}"


def next_missing(buckets: Sequence[Bucket], captured: Container[Bucket]) -> Bucket | None:
    """Which of the buckets, in ascending order, to capture when there is time; `None`: none.

    The largest comes first, since all others fit into its memory, then the smallest that is
    missing: after an idle moment few requests come, not many.
    """
    order = (*buckets[-1:], *buckets[:-1])
    return next((bucket for bucket in order if bucket not in captured), None)
