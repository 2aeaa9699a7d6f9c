"""One engine in this process: text, scheduler and worker joined.

`add` takes a request, `step` takes one turn of the loop, a `RequestHandle` gives the output. Not
safe to share between threads; the faces above see to that.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

from headrace.config.engine_config import EngineConfig
from headrace.engine.outputs import Piece, RequestOutput
from headrace.engine.prompts import (
    Prompt,
    bad_words,
    check_params,
    default_params,
    prompt_token_ids,
    stop_ids,
)
from headrace.engine.sequence_output import SequenceOutput
from headrace.request.request import Request
from headrace.request.sampling_params import SamplingParams
from headrace.runner.assembly import Settled, assemble, settle
from headrace.scheduler.launch import LaunchedStep
from headrace.scheduler.scheduler import Admission, Scheduler
from headrace.scheduler.sequence import Sequence as ScheduledSequence
from headrace.text.build import build_tokenizer
from headrace.text.output_text import OutputText
from headrace.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128


class RequestHandle:
    """A request in flight."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        outputs: list[SequenceOutput],
        sequences: list[ScheduledSequence],
    ) -> None:
        self.request, self.prompt = request, prompt
        self._outputs, self._sequences = outputs, sequences

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        return all(output.ending is not None for output in self._outputs)

    def take_pieces(self) -> list[Piece]:
        """New pieces of all continuations since the last call."""
        pieces = [output.take_piece() for output in self._outputs]
        return [piece for piece in pieces if piece is not None]

    def output(self) -> RequestOutput:
        """The whole result of a finished request."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[
                output.output(sequence.paths)
                for output, sequence in zip(self._outputs, self._sequences, strict=True)
            ],
            prompt_logprobs=self._outputs[0].prompt_entries,
            cached_tokens=self._sequences[0].cached_tokens,
        )


class Engine:
    """The engine of one model.

    Args:
        config: what was asked.
        progress: show a bar while weights load.
        retract_every: see `Scheduler`.
    """

    def __init__(
        self, config: EngineConfig, *, progress: bool = False, retract_every: int = 0
    ) -> None:
        self.settled: Settled = settle(config)
        checkpoint = self.settled.checkpoint
        self.tokenizer = _tokenizer(self.settled)
        self.vocab_size = self.settled.persona.traits.vocab_size
        self.eos_token_ids = _eos_token_ids(self.settled, self.tokenizer)
        self.default_params = default_params(checkpoint.generation_config)
        self.worker = assemble(self.settled, progress=progress)
        self.scheduler = Scheduler(self.worker, self._decode_token, retract_every=retract_every)
        self._handles: dict[str, RequestHandle] = {}
        self._numbers = count()
        self._ongoing: LaunchedStep | None = None

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        text: str | None = None,
        request_id: str | None = None,
        default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestHandle:
        """Queue a request.

        Args:
            text: the prompt as text, where `prompt` holds its ids.
            default_max_tokens: used, as far as the context allows, where params.max_tokens is
                `None`; `None`: the rest of the context.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        ids = self.check(prompt, params)
        request = Request(
            request_id=request_id or f"request-{next(self._numbers)}",
            prompt_token_ids=ids,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        max_tokens = params.max_tokens or self._room(len(ids), default_max_tokens)
        mask = bad_words(params, self.tokenizer)
        outputs = [self._sequence_output(request, index) for index in range(params.n)]
        sequences = self.scheduler.add(
            request,
            max_tokens,
            stop_ids(params, self.eos_token_ids),
            [Admission(sink=output, host_mask=mask) for output in outputs],
        )
        text = prompt if isinstance(prompt, str) else text
        handle = RequestHandle(request, text, outputs, sequences)
        self._handles[request.request_id] = handle
        return handle

    def check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's ids, once prompt and options are known to be valid. Queues nothing."""
        check_params(params, self.tokenizer, self.vocab_size)
        ids = prompt_token_ids(prompt, self.tokenizer, self.vocab_size)
        self.scheduler.check_lengths(len(ids), params.max_tokens or 1)
        return ids

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._ongoing is not None

    def step(self) -> list[RequestHandle]:
        """One turn of the loop; returns the requests that ended in it."""
        self._ongoing = self.scheduler.loop(self._ongoing)
        ended = [handle for handle in self._handles.values() if handle.is_finished]
        for handle in ended:
            del self._handles[handle.request_id]
        return ended

    def abort(self, request_id: str) -> bool:
        """End a request now; unknown and ended ones are left alone (False)."""
        return self.scheduler.abort(request_id)

    def settle(self) -> None:
        """Process the step in flight, if any, and launch nothing."""
        if self._ongoing is not None:
            self.scheduler.process(self._ongoing)
            self._ongoing = None

    def close(self) -> None:
        """Abort what runs and let the step in flight end."""
        for request_id in tuple(self._handles):
            self.abort(request_id)
        self._handles.clear()
        self.settle()

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the state of memory now."""
        keeper, selector = self.scheduler.keeper, self.worker.runner.selector
        return {
            **self.scheduler.counts,
            "running": len(self.scheduler.chooser.running),
            "waiting": len(self.scheduler.chooser.waiting),
            "pages_total": keeper.allocator.total,
            "pages_free": keeper.allocator.available,
            "pages_cached": keeper.cache.held_pages,
            "page_size": keeper.page_size,
            "prompt_tokens_queried": keeper.queried_tokens,
            "prompt_tokens_cached": keeper.hit_tokens,
            "retractions": self.scheduler.chooser.retractions,
            "paths": [
                {"path": path, "refused": refused, "steps": steps}
                for (path, refused), steps in selector.counts.items()
            ],
        }

    def _room(self, prompt_length: int, default: int | None) -> int:
        room = self.scheduler.longest_output(prompt_length)
        return room if default is None else min(default, room)

    def _sequence_output(self, request: Request, index: int) -> SequenceOutput:
        params = request.params
        text = None
        if self.tokenizer is not None:
            text = OutputText(
                self.tokenizer,
                request.prompt_token_ids,
                stops=tuple(params.stop),
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        return SequenceOutput(
            index,
            text,
            hidden_ids=stop_ids(params, self.eos_token_ids),
            keeps_logprobs=params.logprobs is not None or bool(params.logprob_token_ids),
        )

    def _decode_token(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)


def _tokenizer(settled: Settled) -> Tokenizer | None:
    source = settled.tokenizer_source
    return None if source is None else build_tokenizer(source)


def _eos_token_ids(settled: Settled, tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is not None:
        return tokenizer.eos_token_ids
    ids: list[int] = []
    for config in (settled.checkpoint.config, settled.checkpoint.generation_config):
        stated = config.get("eos_token_id")
        ids += stated if isinstance(stated, Sequence) else [] if stated is None else [stated]
    return frozenset(ids)
