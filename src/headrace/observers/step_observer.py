"""Observers: contexts of the host around a forward, and what they send behind it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRun:
    """A forward that is about to run: its batch, the path that was chosen, and its bucket."""

    batch: ForwardBatch
    path: str
    bucket: Bucket

    def __str__(self) -> str:
        batch, bucket = self.batch, self.bucket
        padded = f" of {bucket.tokens}" if bucket.tokens != batch.num_tokens else ""
        variant = f", {bucket.variant}" if bucket.variant else ""
        return (
            f"{self.path} {batch.mode.name.lower()}: {batch.num_sequences} rows, "
            f"{batch.num_tokens}{padded} tokens{variant}"
        )


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the observers of one forward leave: tensors by name ("observer.what").

    They reach the host with the results of the step, so they are memory of their own, or stay as
    they are until the next forward.

    `output`: what the path returned, for observers that leave their context behind it.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    output: LogitsProcessorOutput | None = None

    def attach(self, output: LogitsProcessorOutput) -> LogitsProcessorOutput:
        """Keep the path's output while the observers look; returns it."""
        self.output = output
        return output


class StepObserver(Protocol):
    """Looks at a forward from the host. Between two steps, never inside a graph."""

    name: str

    def around(self, run: ForwardRun, evidence: Evidence) -> AbstractContextManager[None]:
        """Entered before the path runs, left when all of its work is launched."""

    def take(self, host: Mapping[str, Tensor]) -> None:
        """The tensors of a step have arrived, in the order of the steps. May raise."""


@runtime_checkable
class Counts(Protocol):
    """An observer that counts."""

    def stats(self) -> dict[str, Any]:
        """Plain numbers since the start."""


class Observers:
    """All observers of a runner, in order; without one, nothing is done."""

    def __init__(self, members: Sequence[StepObserver] = ()) -> None:
        self.members = tuple(members)

    @contextmanager
    def around(self, run: ForwardRun) -> Iterator[Evidence]:
        evidence = Evidence()
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.around(run, evidence))
            yield evidence

    def take(self, host: Mapping[str, Tensor]) -> None:
        """Hand over what has arrived with a step's results: to all, also where one of them raises,
        which is heard when all have it. A dump holds the step that a canary found wrong."""
        with ExitStack() as stack:
            for member in reversed(self.members):
                stack.callback(member.take, host)

    def plus(self, observer: StepObserver) -> "Observers":
        """The same and one more, innermost."""
        return Observers((*self.members, observer))

    def minus(self, observer: StepObserver) -> "Observers":
        """The same without that one."""
        return Observers([member for member in self.members if member is not observer])

    def stats(self) -> dict[str, Any]:
        """What members count, by their names."""
        return {each.name: each.stats() for each in self.members if isinstance(each, Counts)}
