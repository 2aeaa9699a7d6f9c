"""What a batch of requests would do, step by step, without running it.

The engine's own scheduler composes the steps, over page tables of its own and with a worker that
only asks the selector which path each step would take. So chunks, rows, mixed steps and retraction
are those of the engine, as if it were idle, its prefix cache were empty and no stop token came.
Nothing runs, is captured or counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.base.decision import NotYet, Refusal
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.rows import RowStart
from headrace.config.persona import Persona
from headrace.engine.batch_explanation import BatchExplanation, ForeseenSteps
from headrace.engine.engine import Engine
from headrace.engine.options import check_structured, stop_ids
from headrace.engine.prompts import Prompt
from headrace.engine.requests import PreparedRequest
from headrace.execution.token_ring import InFlight
from headrace.memory.arena import Arena
from headrace.memory.req_to_token import ReqToTokenPool
from headrace.observers.spans import Spans
from headrace.request.outcome import Finished, Logprob
from headrace.request.request import Request
from headrace.request.sampling_params import SamplingParams
from headrace.runner.model_runner import ModelRunner
from headrace.runner.worker import StepResult, TpModelWorker
from headrace.scheduler.admission import Admission
from headrace.scheduler.launch import LaunchedStep
from headrace.scheduler.row_spans import RowSpan, take_routing, take_states_of_rows
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.sequence import Sequence as ScheduledSequence
from headrace.scheduler.sequence import State
from headrace.scheduler.step_work import StepWork

MOST_STEPS = 4096
GREEDY_TOKEN = 0  # what every greedy step is supposed to take


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRequest:
    """A request that will not run. `grammar`: it asks for a form, whose mask waits for tokens."""

    prepared: PreparedRequest
    grammar: bool

    @classmethod
    def of(cls, engine: Engine, prompt: Prompt, params: SamplingParams) -> "DryRequest":
        """Raises `RequestError` where it can never be served. Its grammar is not compiled."""
        check_structured(params, engine.tokenizer, stop_ids(params, engine.eos_token_ids))
        return cls(
            prepared=engine.prepare(prompt, replace(params, structured=None)),
            grammar=params.structured is not None,
        )

    def admission(self) -> Admission:
        """Of one of its sequences."""
        masked = self.grammar or self.prepared.bad_words is not None
        mask = _OpenMask(needs_last_token=self.grammar) if masked else None
        return Admission(sink=_NoSink(), host_mask=mask)


def rehearse(engine: Engine, requests: Sequence[DryRequest]) -> BatchExplanation:
    """What the engine would do with one or more requests, were they all it had."""
    prepared = [request.prepared for request in requests]
    longest = max(len(each.token_ids) + each.max_tokens for each in prepared)
    rows = sum(each.params.n for each in prepared)
    worker = _DryWorker(_DryRunner(engine.worker.runner, rows=rows, longest=longest))
    scheduler = _DryScheduler(cast("TpModelWorker", worker), lambda token: None)
    for index, (each, request) in enumerate(zip(prepared, requests, strict=True)):
        scheduler.add(
            Request(request_id=str(index), prompt_token_ids=each.token_ids, params=each.params),
            each.max_tokens,
            frozenset(),
            [request.admission() for _ in range(each.params.n)],
        )
    last: LaunchedStep | None = None
    while (scheduler.has_work or last is not None) and len(worker.taken) < MOST_STEPS:
        last = scheduler.loop(last)
    return BatchExplanation(
        steps=tuple(_grouped(worker.taken)),
        complete=not scheduler.has_work,
        paths=tuple(path.name for path in engine.worker.runner.selector.paths),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """The path that a step would take."""

    facts: BatchFacts
    path: str
    prepares: bool
    refused: tuple[Refusal, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.facts.mode, self.path, self.refused


def _grouped(taken: Sequence[_Taken]) -> list[ForeseenSteps]:
    found = []
    for _, group in groupby(taken, lambda each: each.kind):
        steps = list(group)
        sequences = [each.facts.sequences for each in steps]
        tokens = [each.facts.tokens for each in steps]
        found.append(
            ForeseenSteps(
                kind=steps[0].facts.mode.name.lower(),
                steps=len(steps),
                sequences=(min(sequences), max(sequences)),
                tokens=(min(tokens), max(tokens)),
                path=steps[0].path,
                prepares=any(each.prepares for each in steps),
                refused=steps[0].refused,
            )
        )
    return found


class _DryRows:
    def admit(self, starts: Sequence[RowStart]) -> None:
        """Columns are for steps that run."""


class _DryRunner:
    """What a scheduler needs of a runner, with page tables on the host."""

    def __init__(self, runner: ModelRunner, *, rows: int, longest: int) -> None:
        self.plan, self.config = runner.plan, runner.config
        self.persona = _without_contents(runner.persona)
        self.kv_budget, self.dtype, self.model = runner.kv_budget, runner.dtype, runner.model
        self.paths, self.explain = runner.paths, runner.explain
        self.device, self.kv_canary = torch.device("cpu"), None
        self.rows, self.spans = _DryRows(), Spans()
        self.req_to_token_pool = ReqToTokenPool(
            Arena("cpu"),
            num_rows=min(rows, runner.plan.max_running_requests.value) + 1,
            max_pages=-(-longest // runner.plan.page_size.value) + 1,
            groups=runner.req_to_token_pool.groups,
        )


@dataclass(slots=True, kw_only=True)
class _DrySplit:
    """A step in parts. `layers`: those left."""

    facts: BatchFacts
    layers: int


class _DryWorker:
    """Asks the selector about each step, and runs none."""

    def __init__(self, runner: _DryRunner) -> None:
        self.runner = runner
        self.taken: list[_Taken] = []

    def forward_batch_generation(self, batch: ForwardBatch) -> StepResult:
        return self._take(batch.facts)

    def begin_split(self, batch: ForwardBatch) -> _DrySplit:
        return _DrySplit(facts=batch.facts, layers=len(self.runner.model.model.layers))

    def advance_split(self, step: _DrySplit, layers: int) -> StepResult | None:
        step.layers -= layers
        return self._take(step.facts) if step.layers <= 0 else None

    def _take(self, facts: BatchFacts) -> StepResult:
        decision = self.runner.explain(facts)
        path, refused = decision.value, decision.refused
        ready = next((each for each in refused if isinstance(each, NotYet)), None)
        if ready is not None:  # a step of the engine makes it ready, and then takes it
            path, refused = ready.subject, refused[: refused.index(ready)]
        self.taken.append(
            _Taken(facts=facts, path=path, prepares=ready is not None, refused=refused)
        )
        return StepResult(
            path=path,
            bucket=Bucket(tokens=facts.tokens, sequences=facts.sequences),
            refused=refused,
            in_flight=InFlight(host={}, event=None),
        )


class _DryScheduler(Scheduler):
    """Takes what every step would bring, rows without contents and tokens without meaning."""

    def _take_results(self, step: LaunchedStep) -> None:
        for share in step.work.shares:
            if share.sequence.state is not State.FINISHED:
                share.sequence.computed += share.new_tokens
        _take_rows(step.work)
        for share in step.work.sampling:
            sequence = share.sequence
            if sequence.state is State.FINISHED:
                continue
            first = not sequence.proven_finite
            sequence.proven_finite = True
            sequence.tokens.append(_token_of(sequence))
            if len(sequence.tokens) >= sequence.max_length:
                self.endings.finish(sequence, Finished("length"))
            elif first:
                self.keeper.share(sequence)


def _take_rows(work: StepWork) -> None:
    """What requests ask for besides tokens: retracted sequences do not compute it once more."""
    for span in work.prompt_spans:
        if len(span.sequence.prompt_entries) == span.first:
            span.sequence.prompt_entries += [None] * span.count
    finite = {share.sequence: True for share in work.shares}
    parts = work.state_parts
    states = _empty_rows(parts.rows, len(parts.layers) + 1)
    take_states_of_rows(parts.rows, states, parts.layers, finite)
    take_routing(work.routing, _empty_rows(work.routing, 1), finite)


def _empty_rows(spans: Sequence[RowSpan[Any]], layers: int) -> Tensor:
    """[rows of all spans, layers, 0]"""
    return torch.empty((sum(span.count for span in spans), layers, 0), dtype=torch.uint8)


def _token_of(sequence: ScheduledSequence) -> int:
    """Sequences of different seeds go different ways, so that none finds the other's cached; no
    model has these ids."""
    greedy = sequence.request.params.greedy
    return GREEDY_TOKEN if greedy else -1 - sequence.seed % (1 << 62)


def _without_contents(persona: Persona) -> Persona:
    """The same but for what a row of hidden states or experts holds, which is nothing."""
    traits, moe = persona.traits, persona.traits.moe
    moe = None if moe is None else replace(moe, num_experts_per_tok=0)
    return replace(persona, traits=replace(traits, hidden_size=0, moe=moe))


class _NoSink:
    """Where nobody listens."""

    def token(self, token_id: int, logprobs: dict[int, Logprob] | None) -> str | None:
        return None

    def prompt_logprobs(self, entries: Sequence[dict[int, Logprob] | None]) -> None:
        pass

    def embedding(self, vector: "NDArray[Any]") -> None:
        pass

    def hidden_states(self, states: Any) -> None:
        pass

    def routed_experts(self, ids: Any) -> None:
        pass

    def finished(self, ending: Finished) -> None:
        assert ending.reason != "error", ending.message  # else told as a step that ends sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenMask:
    """Stands for a grammar or bad words: brings a mask to every step, which forbids nothing."""

    needs_last_token: bool
    failure: str = ""

    def is_ready(self, wait: float = 0.0) -> bool:
        return True

    def narrow(self, output_ids: Sequence[int], allowed: Tensor) -> None:
        pass
