"""A way to run a forward, as the selector sees it."""

from dataclasses import dataclass
from typing import Protocol

from headrace.base.decision import Refusal
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What preparing a path cost; both empty for a path that captures nothing.

    Attributes:
        bytes: memory of tensors; what a driver keeps for a graph comes on top.
    """

    seconds: dict[Bucket, float]
    bytes: dict[Bucket, int]


class ForwardPath(Protocol):
    """One path. `admits` is pure and cheap: it looks at the facts only."""

    name: str

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        """The bucket that would serve such a batch, or why none would."""

    def prepare(self) -> CaptureReport:
        """Make the path ready to run."""

    def make_ready(self, facts: BatchFacts) -> None:
        """Capture or compile at need what would serve such a batch; nothing where all is ready."""

    def prepare_more(self) -> bool:
        """Capture one more bucket, within tenths of a second; False: there is nothing (more) that
        can be made ready so fast."""

    def run(self, batch: ForwardBatch, bucket: Bucket) -> LogitsProcessorOutput:
        """Run one forward. Tensors returned live until the next run of the path."""


class AlwaysReady:
    """What a path that captures and compiles nothing says of it."""

    def prepare(self) -> CaptureReport:
        return CaptureReport(seconds={}, bytes={})

    def make_ready(self, facts: BatchFacts) -> None:
        """Nothing is missing."""

    def prepare_more(self) -> bool:
        return False
