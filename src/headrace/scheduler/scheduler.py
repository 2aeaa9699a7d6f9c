"""The loop: take messages, choose a batch, launch it, deal with the results of the one before.

One call of `loop` is one turn. With overlap the step launched in a turn is processed in the next
one, after the next launch; without it in the same turn. Either way a sequence ends exactly once,
and its row and pages are freed only after the last launched step that names it was processed.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.batch.forward_batch import ForwardBatch
from headrace.execution.split_prefill import SplitPrefill
from headrace.kernels.noise import derive_seed
from headrace.observers.routing import NAME as ROUTED_EXPERTS
from headrace.request.outcome import Finished, FinishReason
from headrace.request.request import Request
from headrace.runner.model_runner import ModelRunner
from headrace.runner.worker import StepResult, TpModelWorker
from headrace.sampling.host_logprobs import Decode
from headrace.sampling.host_mask import HostMask
from headrace.scheduler.canary_watch import canary_watch
from headrace.scheduler.chooser import Chooser, Limits, Share
from headrace.scheduler.launch import (
    BatchBuilder,
    LaunchedStep,
    SplitInFlight,
    StepWork,
    row_start,
)
from headrace.scheduler.lengths import LengthLimits
from headrace.scheduler.page_keeper import PageKeeper
from headrace.scheduler.pooling import take_states
from headrace.scheduler.results import sampled_logprobs, take_prompt_logprobs, take_token
from headrace.scheduler.routing_rows import routing_rows_of
from headrace.scheduler.row_spans import take_routing
from headrace.scheduler.sequence import Sequence, State, TokenSink
from headrace.scheduler.state_rows import state_rows_of
from headrace.scheduler.step_history import StepHistory
from headrace.scheduler.unready import Unready

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One sequence of a request, as the engine hands it over."""

    sink: TokenSink
    host_mask: HostMask | None = None


class Scheduler:
    """Continuous batching over one worker.

    Args:
        worker: runs the steps.
        decode_token: text of a token id, for logprobs; gives `None` without a tokenizer.
        before_step: called before a step is built, with its number and whether it reads prompts.
        retract_every: retract the latest sequence every n steps (0: never); for tests that prove
            retraction to be transparent.
    """

    def __init__(
        self,
        worker: TpModelWorker,
        decode_token: Decode,
        *,
        before_step: Callable[[int, bool], None] | None = None,
        retract_every: int = 0,
    ) -> None:
        runner: ModelRunner = worker.runner
        plan = runner.plan
        self.worker = worker
        self._traits = runner.persona.traits
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
            Limits(
                prompt_tokens=plan.chunked_prefill_size.value,
                sequences=plan.max_running_requests.value,
            ),
        )
        self.counts: Counter[str] = Counter()
        self.history = StepHistory()
        self._canary = canary_watch(runner, self.keeper, self.counts)
        self.spans = runner.spans
        self._before_step = before_step
        self._builder = BatchBuilder(runner.device, self._traits.vocab_size)
        self._decode_token = decode_token
        self._retract_every = retract_every
        self._split: SplitInFlight | None = None
        self._groups: dict[str, list[Sequence]] = {}
        self._ended: list[str] = []
        self._unready = Unready()
        self._arrivals = 0
        self._seeds = random.Random(runner.config.seed)

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
        seed = request.params.seed
        if request.pooling is not None:
            seed = 0  # nothing is sampled, so nothing is drawn
        elif seed is None:
            seed = self._seeds.getrandbits(63)
        leader: Sequence | None = None
        group = []
        for index, admission in enumerate(admissions):
            sequence = Sequence(
                request=request,
                index=index,
                seed=derive_seed(seed, index),
                stop_ids=stop_ids,
                max_length=len(request.prompt_token_ids) + max_tokens,
                sink=admission.sink,
                host_mask=admission.host_mask,
                mask_is_ready=admission.host_mask is None,
                leader=leader,
                state_rows=state_rows_of(request, self._traits, self.worker.runner.dtype),
                routing_rows=routing_rows_of(request, self._traits),
                arrival=self._arrivals,
            )
            self._arrivals += 1
            leader = leader or sequence
            group.append(sequence)
        self._groups[request.request_id] = group
        for sequence in group:
            self.chooser.waiting.push(sequence)
        self._unready.add(group)
        return list(group)

    def abort(self, request_id: str, message: str = "aborted by the caller") -> bool:
        """End what is left of a request; False when nothing of it is left."""
        left = tuple(self._groups.get(request_id, ()))
        for sequence in left:
            self._finish(sequence, Finished("abort", message=message))
        return bool(left)

    def take_ended(self) -> list[str]:
        """Ids of the requests whose last sequence ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # ---- the loop

    @property
    def has_work(self) -> bool:
        return bool(self._groups) or self._split is not None

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
            self._finish(sequence, ending)
        self.drop_ended_split()
        if self._split is not None and (finished := self._advance_split(self._split)):
            return finished
        with self.spans("schedule"):
            shares = self.chooser.choose(prompts=self._split is None)
        try:
            shares = self._split_off(shares)
            return self._run(shares) if shares else None
        except BaseException as error:
            self._fail(shares, error)
            return None

    def _split_off(self, shares: list[Share]) -> list[Share]:
        """Begin the prompts among `shares` as a step in parts, if others decode and the path takes
        them; the shares that are left to run now."""
        runner = self.worker.runner
        decoding = [share for share in shares if share.from_row]
        prompts = [share for share in shares if not share.from_row]
        if runner.paths.split_prefill is None or not decoding or not prompts:
            return shares
        batch, work = self._build(prompts, split=True)
        if runner.explain(batch.facts).value != SplitPrefill.name:
            return shares
        launched = time.perf_counter()
        try:
            step = self.worker.begin_split(batch)
        except BaseException as error:
            self._fail(prompts, error)
            return decoding
        _hold(prompts)
        self._split = SplitInFlight(work=work, step=step, launched=launched)
        return decoding

    def _advance_split(self, split: SplitInFlight) -> LaunchedStep | None:
        """Launch some more layers, all that are left if nobody decodes; the step once they are."""
        path = self.worker.runner.paths.split_prefill
        assert path is not None, "a split has begun"
        others = any(sequence.can_decode for sequence in self.chooser.running)
        layers = path.layers if others else len(self.worker.runner.model.model.layers)
        self._tell_step(True)
        try:
            with self.spans("step", self.counts["steps"] + 1, "in part"):
                result = self.worker.advance_split(split.step, layers)
        except BaseException as error:
            self._drop(split)
            self._fail(split.work.shares, error)
            return None
        if result is None:
            return None
        self._split = None
        return self._launched(split.work, result, split.launched)

    def drop_ended_split(self) -> None:
        """A step in parts that nobody waits for any more goes no further. What it has launched is
        done before later steps write to the pages that come free."""
        split = self._split
        if split and all(share.sequence.state is State.FINISHED for share in split.work.shares):
            self._drop(split)

    def _drop(self, split: SplitInFlight) -> None:
        self._split = None
        for share in split.work.shares:
            share.sequence.in_flight -= 1
            self._settle(share.sequence)

    def _fail(self, shares: list[Share], error: BaseException) -> None:
        """Whatever a step raises ends its sequences, not the engine; an interrupt goes on."""
        is_failure = isinstance(error, Exception)
        reason: FinishReason = "error" if is_failure else "abort"
        for share in shares:
            self._finish(share.sequence, Finished(reason, message=_describe(error)))
        if not is_failure:
            raise error
        log.error("A step of %d sequences failed", len(shares), exc_info=error)
        self.counts["failed_steps"] += 1

    def _run(self, shares: list[Share]) -> LaunchedStep:
        self._tell_step(any(not share.from_row for share in shares))
        with self.spans("step", self.counts["steps"] + 1):
            with self.spans("prepare"):
                batch, work = self._build(shares)
            launched = time.perf_counter()
            if self._canary is not None:
                self._canary.before_launch()
            result = self.worker.forward_batch_generation(batch)
        _hold(shares)
        return self._launched(work, result, launched)

    def _tell_step(self, is_prefill: bool) -> None:
        if self._before_step is not None:
            self._before_step(self.counts["steps"] + 1, is_prefill)

    def _build(self, shares: list[Share], *, split: bool = False) -> tuple[ForwardBatch, StepWork]:
        runner, admitted = self.worker.runner, self.chooser.take_admitted()
        if admitted:
            runner.rows.admit([row_start(sequence) for sequence in admitted])
            self._builder.forget()
        runner.req_to_token_pool.flush()
        return self._builder.build(shares, split=split)

    def _launched(self, work: StepWork, result: StepResult, launched: float) -> LaunchedStep:
        """The record of a step of which all is launched, since `launched`."""
        returned = time.perf_counter()
        for share in work.shares:
            sequence = share.sequence
            sequence.took_path(result.path)
            if share.samples:
                sequence.pending += 1
                sequence.sampled_here = True
        self.counts["steps"] += 1
        self.counts["prompt_tokens"] += work.prompt_tokens
        return LaunchedStep(
            work=work,
            result=result,
            number=self.counts["steps"],
            launched=launched,
            returned=returned,
        )

    def process(self, step: LaunchedStep) -> None:
        """Deal with the results of a launched step: tokens, endings, pages that come free."""
        for share in step.work.shares:
            share.sequence.in_flight -= 1
            share.sequence.pending -= share.samples
        try:
            with self.spans("process", step.number):
                self._take_results(step)
        except BaseException as error:
            self._fail(step.work.shares, error)
        finally:
            for share in step.work.shares:
                self._settle(share.sequence)

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
                self._finish(sequence, Finished("error", message=message))
        take_prompt_logprobs(work, results, self._decode_token)
        logprobs = sampled_logprobs(work, results, self._decode_token)
        finite = dict.fromkeys((share.sequence for share in work.shares), True)
        for place, share in enumerate(work.sampling):
            finite[share.sequence] = results.finite[place]
        for share in work.shares:
            if share.sequence.state is not State.FINISHED and finite[share.sequence]:
                share.sequence.computed += share.new_tokens
        for sequence, end in take_states(work.state_parts, results.hidden, finite):
            self._finish(sequence, end)
        if work.routing:
            take_routing(work.routing, results.evidence[ROUTED_EXPERTS], finite)
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
                self._finish(sequence, ending)
            elif first:
                self.keeper.share(sequence)

    def _settle(self, sequence: Sequence) -> None:
        self.chooser.settle(sequence)
        if sequence.request.request_id not in self._groups:
            self.keeper.forget_request(sequence)

    def _finish(self, sequence: Sequence, ending: Finished) -> None:
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self.chooser.waiting.remove(sequence)
        sequence.state = State.FINISHED
        sequence.ending = ending
        self.counts[f"finished_{ending.reason}"] += 1
        group = self._groups[sequence.request.request_id]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request.request_id]
            self._ended.append(sequence.request.request_id)
        self._settle(sequence)
        if sequence.state_rows is not None:
            sequence.sink.hidden_states(sequence.state_rows.packed())
        if sequence.routing_rows is not None:
            sequence.sink.routed_experts(sequence.routing_rows.packed())
        sequence.sink.finished(ending)

    # ---- checks

    def _check(self, request: Request, max_tokens: int) -> None:
        if request.request_id in self._groups:
            raise RequestError(f"Request id {request.request_id!r} is in flight already")
        if not request.prompt_token_ids:
            raise RequestError("The prompt is empty", remedy="Send at least one token")
        self.lengths.check(len(request.prompt_token_ids), max_tokens)

    def check_integrity(self) -> None:
        """Every page and row accounted for; raises `IntegrityError` otherwise."""
        self.keeper.check(self.chooser.running)

    def _retract_for_test(self) -> None:
        every = self._retract_every
        if every and self.counts["steps"] % every == every - 1 and len(self.chooser.running) > 1:
            latest = self.chooser.running[-1]
            if latest.state is State.RUNNING and latest.sampled_here:
                self.chooser.retract(latest)


def _hold(shares: list[Share]) -> None:
    """A step is under way: its sequences keep rows and pages until it is processed."""
    for share in shares:
        share.sequence.length_bound += share.new_tokens
        share.sequence.in_flight += 1


def _describe(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text[:500]}"
