"""One engine in this process: text, scheduler and worker joined.

`prepare` (or `prepare_embedding`) checks a request, `submit` queues it, `step` takes one turn of
the loop, a `RequestHandle` gives the output. Not safe to share between threads; the faces above see
to that.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.config.engine_config import EngineConfig
from headrace.engine.dumping import StepDumper
from headrace.engine.explanation import explanation_of, sampling_defaults, uncovered_decode
from headrace.engine.figures import load_of, stats_of
from headrace.engine.interrupts import interrupts_held
from headrace.engine.options import (
    bad_words,
    check_end_tokens,
    check_states,
    checked_stop_ids,
    default_params,
    settled_pooling,
)
from headrace.engine.profiling import StepProfiler
from headrace.engine.prompts import Prompt, prompt_token_ids
from headrace.engine.requests import PreparedRequest, RequestHandle
from headrace.engine.sequence_output import SequenceOutput
from headrace.engine.vocabulary import (
    eos_token_ids_of,
    grammar_compiler,
    token_text,
    tokenizer_of,
)
from headrace.models.decoder import CausalDecoder
from headrace.request.messages import Load
from headrace.request.pooling_params import PoolingParams
from headrace.request.request import Request
from headrace.request.sampling_params import SamplingParams
from headrace.runner.assembly import Settled, assemble, settle
from headrace.runner.report import decision_lines, summary
from headrace.runner.worker import TpModelWorker
from headrace.scheduler.admission import Admission
from headrace.scheduler.launch import LaunchedStep
from headrace.scheduler.scheduler import Scheduler
from headrace.text.tokenizer import Tokenizer

log = get_logger(__name__)

DEFAULT_MAX_TOKENS = 128


class Engine:
    """The engine of one model.

    Args:
        config: what was asked.
        progress: show a bar while weights load.
        retract_every: see `Scheduler`.
        model: weights of an earlier engine, which ends with that; see `assemble`.
        tokenizer: the checkpoint's, where it is built already: a large one takes a second.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        retract_every: int = 0,
        model: CausalDecoder | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.settled: Settled = settle(config)
        checkpoint = self.settled.checkpoint
        self.tokenizer = tokenizer or tokenizer_of(self.settled)
        self.vocab_size = self.settled.persona.traits.vocab_size
        self.eos_token_ids = eos_token_ids_of(self.settled, self.tokenizer)
        check_end_tokens(self.eos_token_ids)
        self.default_params = default_params(checkpoint.generation_config)
        self.worker = assemble(self.settled, progress=progress, model=model)
        self.profiler = StepProfiler(self.worker.runner.spans)
        self.scheduler = Scheduler(
            self.worker,
            token_text(self.tokenizer),
            before_step=self.profiler.before_step,
            retract_every=retract_every,
        )
        self.dumper = StepDumper(self.worker.runner)
        self.grammars = grammar_compiler(self.tokenizer, self.vocab_size, self.eos_token_ids)
        _log_start(self.settled, self.worker)
        self._handles: dict[str, RequestHandle] = {}
        self._numbers = count()
        self._ongoing: LaunchedStep | None = None

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestHandle:
        """Queue a request: `prepare` and `submit` in one."""
        return self.submit(
            self.prepare(prompt, params),
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        text: str | None = None,
        default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
    ) -> PreparedRequest:
        """Turn prompt and options into what the scheduler needs. Queues nothing, and may be called
        from any thread.

        Args:
            text: the prompt as text, where `prompt` holds its ids.
            default_max_tokens: used, as far as the context allows, where params.max_tokens is
                `None`; `None`: the rest of the context.

        A grammar begins to be compiled; `PreparedRequest.wait` tells whether it is one.

        Raises:
            RequestError: it can never be served.
        """
        if params.logit_bias:
            params = replace(params)  # its dict is in the caller's hands: keep one of our own
        ends = checked_stop_ids(params, self.settled, self.tokenizer, self.eos_token_ids)
        ids = prompt_token_ids(prompt, self.tokenizer, self.vocab_size)
        check_states(params, len(ids), self.settled)
        self.scheduler.lengths.check(len(ids), params.max_tokens or max(1, params.min_tokens))
        structured = params.structured
        max_tokens = params.max_tokens or self._room(len(ids), params, default_max_tokens)
        return PreparedRequest(
            text=prompt if isinstance(prompt, str) else text,
            token_ids=ids,
            params=params,
            max_tokens=max_tokens,
            stop_ids=ends,
            bad_words=bad_words(params, self.tokenizer),
            grammar=None if structured is None else self.grammars.start(structured),
        )

    def prepare_embedding(
        self, prompt: Prompt, pooling: PoolingParams, *, text: str | None = None
    ) -> PreparedRequest:
        """As `prepare`, for a request that ends in an embedding.

        Raises:
            RequestError: it can never be served.
        """
        pooling = settled_pooling(pooling, self.settled.checkpoint.pooling)
        pooling.check_size(self.settled.persona.traits.hidden_size)
        ids = prompt_token_ids(prompt, self.tokenizer, self.vocab_size)
        self.scheduler.lengths.check(len(ids), 0)
        text = prompt if isinstance(prompt, str) else text
        return PreparedRequest(text=text, token_ids=ids, pooling=pooling)

    def submit(
        self,
        prepared: PreparedRequest,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestHandle:
        """Queue a prepared request.

        Raises:
            RequestError: its `request_id` is in flight already; nothing was queued.
        """
        request = Request(
            request_id=request_id or f"request-{next(self._numbers)}",
            prompt_token_ids=prepared.token_ids,
            params=prepared.params,
            priority=priority,
            cache_salt=cache_salt,
            pooling=prepared.pooling,
        )
        outputs = [
            SequenceOutput(request, index, self.tokenizer, prepared.stop_ids)
            for index in range(prepared.params.n)
        ]
        with interrupts_held():
            sequences = self.scheduler.add(
                request,
                prepared.max_tokens,
                prepared.stop_ids,
                [Admission(sink=output, host_mask=prepared.host_mask()) for output in outputs],
            )
            handle = RequestHandle(request, prepared.text, outputs, sequences)
            self._handles[request.request_id] = handle
        return handle

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._ongoing is not None

    def step(self) -> list[RequestHandle]:
        """One turn of the loop; returns the requests that ended in it."""
        with interrupts_held():
            last, self._ongoing = self._ongoing, None
            try:
                self._ongoing = self.scheduler.loop(last)
            finally:
                ended = self._forget_ended()
                self.profiler.after_turn()
            if not self.scheduler.has_work:
                self.settle()  # the last request ended in this turn: its memory is free now
            return ended

    def prepare_in_idle(self) -> bool:
        """Capture one graph that no step has asked for yet: tenths of a second, which the next
        request may have to wait. False: there is none, or there is work."""
        if self.has_work:
            return False
        with interrupts_held():
            return self.worker.runner.prepare_in_idle()

    def abort(
        self,
        request_ids: Iterable[str],
        *,
        message: str = "aborted by the caller",
        settle: bool = True,
    ) -> None:
        """End requests now. Unknown and ended ones are left alone.

        Args:
            message: goes into their endings.
            settle: let the step in flight, if any, end too, so that what they held is free
                afterwards; otherwise that comes with the next turns, and the overlap stays.
        """
        with interrupts_held():
            for request_id in request_ids:
                self.scheduler.abort(request_id, message)
            self._forget_ended()
            if settle:
                self.settle()

    def settle(self) -> None:
        """Process the step in flight, if any, and launch nothing."""
        with interrupts_held():
            last, self._ongoing = self._ongoing, None
            if last is not None:
                self.scheduler.process(last)
            self.scheduler.splits.drop_ended()
            self._forget_ended()

    def flush_cache(self) -> int:
        """Give back every page of the prefix cache; returns how many.

        Raises:
            RequestError: requests run or wait.
        """
        if self.scheduler.has_work:
            chooser = self.scheduler.chooser
            raise RequestError(
                "The prefix cache cannot be flushed now",
                why=f"{len(chooser.running)} sequences run and {len(chooser.waiting)} wait",
                remedy="Try again when the engine is idle",
            )
        with interrupts_held():
            self.settle()
            return self.scheduler.keeper.cache.clear()

    def close(self) -> None:
        """Abort what runs and let the step in flight end."""
        self.abort(tuple(self._handles))
        self.profiler.close()
        self.grammars.close()

    def load(self) -> Load:
        """How busy it is; cheap enough for every turn."""
        return load_of(self.scheduler)

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the state of memory now."""
        return stats_of(self.scheduler, self.grammars)

    def _forget_ended(self) -> list[RequestHandle]:
        return [self._handles.pop(request_id) for request_id in self.scheduler.take_ended()]

    def _room(self, prompt_length: int, params: SamplingParams, default: int | None) -> int:
        room = self.scheduler.lengths.longest_output(prompt_length)
        return room if default is None else min(max(default, params.min_tokens), room)


def _log_start(settled: Settled, worker: TpModelWorker) -> None:
    explanation = explanation_of(settled, worker.runner)
    log.info("Ready on %s", summary(explanation))
    if warning := uncovered_decode(settled.plan):
        log.warning("%s", warning)
    defaults = sampling_defaults(settled)
    if defaults.refused:
        names = ", ".join(refusal.subject for refusal in defaults.refused)
        log.warning("generation_config.json states %s, which nothing here heeds", names)
    for line in decision_lines((*settled.plan, defaults)):
        log.info("%s", line)
