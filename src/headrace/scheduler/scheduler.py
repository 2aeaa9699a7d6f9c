"""The loop: take messages, choose a batch, launch it, deal with the results of the one before.

One call of `loop` is one turn. With overlap the step launched in a turn is processed in the next
one, after the next launch; without it in the same turn. Either way a sequence ends exactly once,
and its row and pages are freed only after the last launched step that names it was processed.
"""

from collections import Counter
from collections.abc import Callable

from headrace.base.errors import RequestError
from headrace.observers.routing import NAME as ROUTED_EXPERTS
from headrace.request.outcome import Finished
from headrace.request.request import Request
from headrace.runner.worker import HostResults, TpModelWorker
from headrace.sampling.host_logprobs import Decode
from headrace.scheduler.admission import Admission, Admissions
from headrace.scheduler.canary_watch import canary_watch
from headrace.scheduler.chooser import Chooser
from headrace.scheduler.endings import Endings
from headrace.scheduler.launch import LaunchedStep, Launcher
from headrace.scheduler.lengths import LengthLimits
from headrace.scheduler.page_keeper import PageKeeper
from headrace.scheduler.pooling import take_states
from headrace.scheduler.results import sampled_logprobs, take_prompt_logprobs, take_token
from headrace.scheduler.row_spans import take_routing
from headrace.scheduler.sequence import Sequence, State
from headrace.scheduler.split_steps import SplitSteps
from headrace.scheduler.step_history import StepHistory
from headrace.scheduler.step_work import StepWork
from headrace.scheduler.unready import Unready


class Scheduler:
    """Continuous batching over one worker.

    Args:
        worker: runs the steps.
        decode_token: text of a token id, for logprobs; gives `None` without a tokenizer.
        before_step: called before a step is built, with its number and whether it reads prompts.
        retract_every: retract the latest sequence every n steps (0: never), one that runs alone
            once; for tests that prove retraction to be transparent.
    """

    def __init__(
        self,
        worker: TpModelWorker,
        decode_token: Decode,
        *,
        before_step: Callable[[int, bool], None] | None = None,
        retract_every: int = 0,
    ) -> None:
        runner, plan = worker.runner, worker.runner.plan
        self.worker, self.spans = worker, worker.runner.spans
        self.overlap = plan.overlap.value
        self.keeper = PageKeeper(
            runner.req_to_token_pool,
            runner.kv_budget.pages,
            plan.page_size.value,
            plan.prefix_cache.value,
        )
        self.lengths = LengthLimits(plan.max_model_len, self.keeper.capacity_tokens)
        self.chooser = Chooser(
            self.keeper,
            most_prompt_tokens=plan.chunked_prefill_size.value,
            most_sequences=plan.max_running_requests.value,
        )
        self.counts: Counter[str] = Counter()
        self.endings = Endings(self.chooser, self.counts)
        self.history = StepHistory()
        self._canary = canary_watch(runner, self.keeper, self.counts)
        self._launcher = Launcher(worker, self.chooser, self._canary, self.counts, before_step)
        self.splits = SplitSteps(worker, self.chooser, self._launcher, self.endings)
        self._admissions = Admissions(runner.config.seed, runner.persona.traits, runner.dtype)
        self._unready = Unready()
        self._decode_token = decode_token
        self._retract_every = retract_every

    # ---- messages

    def add(
        self,
        request: Request,
        max_tokens: int,
        stop_ids: frozenset[int],
        admissions: list[Admission],
    ) -> list[Sequence]:
        """Queue the sequences of a request; `admissions` has one entry for each of its n.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self._check(request, max_tokens)
        group = self._admissions.sequences_of(request, max_tokens, stop_ids, admissions)
        self.endings.expect(request.request_id, group)
        for sequence in group:
            self.chooser.waiting.push(sequence)
        self._unready.add(group)
        return group

    def abort(self, request_id: str, message: str = "aborted by the caller") -> bool:
        """End what is left of a request; False when nothing of it is left."""
        left = self.endings.left_of(request_id)
        for sequence in left:
            self.endings.finish(sequence, Finished("abort", message=message))
        return bool(left)

    def take_ended(self) -> list[str]:
        """Ids of the requests whose last sequence ended since the last call."""
        return self.endings.take_ended()

    # ---- the loop

    @property
    def has_work(self) -> bool:
        return self.endings.are_due or self.splits.in_flight is not None

    def loop(self, last: LaunchedStep | None) -> LaunchedStep | None:
        """One turn; returns the step to hand to the next turn.

        A step that fails ends its sequences and the turn goes on. What is no failure, such as an
        interrupt, is raised, and leaves no step in flight.
        """
        unprocessed = [] if last is None else [last]
        try:
            ongoing = self._launch()
            if ongoing is not None:
                unprocessed.append(ongoing)
            while len(unprocessed) > int(self.overlap and ongoing is not None):
                self.process(unprocessed.pop(0))
        except BaseException:
            for step in unprocessed:
                self.process(step)
            raise
        return unprocessed[0] if unprocessed else None

    def _launch(self) -> LaunchedStep | None:
        self._retract_for_test()
        for sequence, ending in self._unready.ask(is_idle=not self.chooser.running):
            self.endings.finish(sequence, ending)
        self.splits.drop_ended()
        if finished := self.splits.advance():
            return finished
        with self.spans("schedule"):
            shares = self.chooser.choose(prompts=self.splits.in_flight is None)
        try:
            shares = self.splits.take(shares)
            return self._launcher.run(shares) if shares else None
        except BaseException as error:
            self.endings.fail(shares, error)
            return None

    def process(self, step: LaunchedStep) -> None:
        """Deal with the results of a launched step: tokens, endings, pages that come free."""
        for share in step.work.shares:
            share.sequence.in_flight -= 1
            share.sequence.pending -= share.samples
        try:
            with self.spans("process", step.number):
                self._take_results(step)
        except BaseException as error:
            self.endings.fail(step.work.shares, error)
        finally:
            for share in step.work.shares:
                self.endings.settle(share.sequence)

    def _take_results(self, step: LaunchedStep) -> None:
        work = step.work
        try:
            with self.spans("wait", step.number):
                results = step.result.collect()
        finally:
            self.history.take(step)
        self.worker.runner.observers.take(results.evidence)
        if self._canary is not None:
            for sequence, message in self._canary.judge(work.shares):
                self.endings.finish(sequence, Finished("error", message=message))
        take_prompt_logprobs(work, results, self._decode_token)
        finite = dict.fromkeys((share.sequence for share in work.shares), True)
        for place, share in enumerate(work.sampling):
            finite[share.sequence] = results.finite[place]
        for share in work.shares:
            if share.sequence.state is not State.FINISHED and finite[share.sequence]:
                share.sequence.computed += share.new_tokens
        for sequence, end in take_states(work.state_parts, results.hidden, finite):
            self.endings.finish(sequence, end)
        if work.routing:
            take_routing(work.routing, results.evidence[ROUTED_EXPERTS], finite)
        self._take_tokens(work, results)

    def _take_tokens(self, work: StepWork, results: HostResults) -> None:
        logprobs = sampled_logprobs(work, results, self._decode_token)
        for place, share in enumerate(work.sampling):
            sequence = share.sequence
            if sequence.state is State.FINISHED:
                continue  # it ended while this step was in flight: the token is dropped
            first = not sequence.proven_finite
            if first and sequence.prompt_entries:
                sequence.sink.prompt_logprobs(sequence.prompt_entries)
            ending = take_token(
                sequence, results.tokens[place], results.finite[place], logprobs[place]
            )
            self.counts["output_tokens"] += ending is None or ending.reason != "error"
            if ending is not None:
                self.endings.finish(sequence, ending)
            elif first:
                self.keeper.share(sequence)

    # ---- checks

    def _check(self, request: Request, max_tokens: int) -> None:
        if self.endings.left_of(request.request_id):
            raise RequestError(f"Request id {request.request_id!r} is in flight already")
        if not request.prompt_token_ids:
            raise RequestError("The prompt is empty", remedy="Send at least one token")
        self.lengths.check(len(request.prompt_token_ids), max_tokens)

    def check_integrity(self) -> None:
        """Every page and row accounted for; raises `IntegrityError` otherwise."""
        self.keeper.check(self.chooser.running)

    def _retract_for_test(self) -> None:
        every = self._retract_every
        if every and self.counts["steps"] % every == every - 1 and self.chooser.running:
            latest = self.chooser.running[-1]
            spared = len(self.chooser.running) == 1 and latest.retractions  # else it hardly decodes
            if latest.state is State.RUNNING and latest.sampled_here and not spared:
                self.chooser.retract(latest)
