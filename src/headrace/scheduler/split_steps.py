"""A prompt step that runs some layers at a time, while steps of others run between its parts."""

import time
from dataclasses import dataclass

from headrace.execution.split_prefill import SplitPrefill
from headrace.runner.worker import SplitStep, TpModelWorker
from headrace.scheduler.chooser import Chooser, Share
from headrace.scheduler.endings import Endings
from headrace.scheduler.launch import LaunchedStep, Launcher, hold
from headrace.scheduler.sequence import State
from headrace.scheduler.step_work import StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInFlight:
    """A prompt step of which some layers are launched. `launched`: seconds before the first."""

    work: StepWork
    step: SplitStep
    launched: float


class SplitSteps:
    """At most one such step at a time; nobody is admitted meanwhile."""

    def __init__(
        self,
        worker: TpModelWorker,
        chooser: Chooser,
        launcher: Launcher,
        endings: Endings,
    ) -> None:
        self._worker, self._chooser = worker, chooser
        self._launcher, self._endings = launcher, endings
        self.in_flight: SplitInFlight | None = None

    def take(self, shares: list[Share]) -> list[Share]:
        """Begin the prompts among `shares` as a step in parts, if others decode and the path takes
        them; the shares that are left to run now."""
        runner = self._worker.runner
        if runner.paths.split_prefill is None:
            return shares
        decoding = [share for share in shares if share.from_row]
        prompts = [share for share in shares if not share.from_row]
        if not decoding or not prompts:
            return shares
        batch, work = self._launcher.build(prompts, split=True)
        if runner.explain(batch.facts).value != SplitPrefill.name:
            return shares
        launched = time.perf_counter()
        try:
            step = self._worker.begin_split(batch)
        except BaseException as error:
            self._endings.fail(prompts, error)
            return decoding
        hold(prompts)
        self.in_flight = SplitInFlight(work=work, step=step, launched=launched)
        return decoding

    def advance(self) -> LaunchedStep | None:
        """Launch some more layers of the step in parts, all that are left if nobody decodes; the
        step once they are."""
        split, path = self.in_flight, self._worker.runner.paths.split_prefill
        if split is None or path is None:
            return None
        others = any(sequence.can_decode for sequence in self._chooser.running)
        layers = path.layers if others else len(self._worker.runner.model.model.layers)
        self._launcher.announce(is_prefill=True)
        try:
            with self._worker.runner.spans("step", self._launcher.next_number, "in part"):
                result = self._worker.advance_split(split.step, layers)
        except BaseException as error:
            self._drop(split)
            self._endings.fail(split.work.shares, error)
            return None
        if result is None:
            return None
        self.in_flight = None
        return self._launcher.record(split.work, result, split.launched)

    def drop_ended(self) -> None:
        """A step in parts that nobody waits for any more goes no further. What it has launched is
        done before later steps write to the pages that come free."""
        split = self.in_flight
        if split and all(share.sequence.state is State.FINISHED for share in split.work.shares):
            self._drop(split)

    def _drop(self, split: SplitInFlight) -> None:
        self.in_flight = None
        for share in split.work.shares:
            share.sequence.in_flight -= 1
            self._endings.settle(share.sequence)
