"""From the shares of a step to the step in flight."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headrace.batch.forward_batch import ForwardBatch
from headrace.runner.worker import StepResult, TpModelWorker
from headrace.scheduler.batch_builder import BatchBuilder, row_start
from headrace.scheduler.canary_watch import CanaryWatch
from headrace.scheduler.chooser import Chooser, Share
from headrace.scheduler.step_work import StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step in flight.

    Attributes:
        number: counts launched steps from 1.
        launched, returned: seconds of `time.perf_counter` before and after the launch.
    """

    work: StepWork
    result: StepResult
    number: int
    launched: float
    returned: float


class Launcher:
    """Builds and launches steps, whole ones.

    Args:
        worker: runs them. chooser: whose admitted sequences get their columns first.
        canary: sweeps the prefix cache now and then. counts: gets "steps" and "prompt_tokens".
        before_step: called before a step is built, with its number and whether it reads prompts.
    """

    def __init__(
        self,
        worker: TpModelWorker,
        chooser: Chooser,
        canary: CanaryWatch | None,
        counts: Counter[str],
        before_step: Callable[[int, bool], None] | None,
    ) -> None:
        runner = worker.runner
        self._worker, self._chooser, self._canary = worker, chooser, canary
        self._counts, self._before_step = counts, before_step
        self._spans = runner.spans
        self._builder = BatchBuilder(runner.device, runner.persona.traits.vocab_size)

    @property
    def next_number(self) -> int:
        """That of the step to be launched next."""
        return self._counts["steps"] + 1

    def run(self, shares: list[Share]) -> LaunchedStep:
        """Launch a step; its sequences keep rows and pages until it is processed."""
        self.announce(is_prefill=any(not share.from_row for share in shares))
        with self._spans("step", self.next_number):
            with self._spans("prepare"):
                batch, work = self.build(shares)
            launched = time.perf_counter()
            if self._canary is not None:
                self._canary.before_launch()
            result = self._worker.forward_batch_generation(batch)
        hold(shares)
        return self.record(work, result, launched)

    def announce(self, *, is_prefill: bool) -> None:
        """Tell who asked before each step."""
        if self._before_step is not None:
            self._before_step(self.next_number, is_prefill)

    def build(self, shares: list[Share], *, split: bool = False) -> tuple[ForwardBatch, StepWork]:
        """The batch of a step; what rows and page tables lack for it is sent ahead."""
        runner, admitted = self._worker.runner, self._chooser.take_admitted()
        if admitted:
            runner.rows.admit([row_start(sequence) for sequence in admitted])
            self._builder.forget()
        runner.req_to_token_pool.flush()
        return self._builder.build(shares, split=split)

    def record(self, work: StepWork, result: StepResult, launched: float) -> LaunchedStep:
        """The record of a step of which all is launched, since `launched`."""
        returned = time.perf_counter()
        for share in work.shares:
            sequence = share.sequence
            sequence.took_path(result.path)
            if share.samples:
                sequence.pending += 1
                sequence.sampled_here = True
        self._counts["steps"] += 1
        self._counts["prompt_tokens"] += work.prompt_tokens
        return LaunchedStep(
            work=work,
            result=result,
            number=self._counts["steps"],
            launched=launched,
            returned=returned,
        )


def hold(shares: list[Share]) -> None:
    """A step is under way: its sequences keep rows and pages until it is processed."""
    for share in shares:
        share.sequence.length_bound += share.new_tokens
        share.sequence.in_flight += 1
