"""Completion replies, whole and streamed, from the deltas of a generation."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from headrace.request.messages import Delta, TokenLogprobs
from headrace.serving.event_stream import DONE, event_of
from headrace.serving.generation import Generation
from headrace.serving.hidden_states import last_state
from headrace.serving.openai.completion_plan import CompletionPlan
from headrace.serving.openai.completion_request import CompletionRequest
from headrace.serving.openai.logprobs import TokenNames, completion_entries, prompt_entries
from headrace.serving.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)


@dataclass(slots=True)
class _Progress:
    """How far one choice is: characters told so far (the echo included), its logprobs for picking,
    and its deltas that wait for the logprobs of the echoed prompt."""

    offset: int = 0
    has_begun: bool = False
    logprob: float = 0.0
    tokens: int = 0
    held: list[Delta] = field(default_factory=list)

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(self.tokens, 1)


class CompletionReply:
    """Makes the reply to one request.

    Both forms are made of the same chunks: the stream sends them, the whole reply joins those of a
    choice. The number that a client sees of a choice is prompt * n + continuation.
    """

    def __init__(
        self, body: CompletionRequest, plan: CompletionPlan, generation: Generation, model: str
    ) -> None:
        service = generation.service
        self._body, self._plan, self._generation = body, plan, generation
        self._model, self._fingerprint = model, service.fingerprint
        self._created = int(time.time())
        self._names = TokenNames(service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._made = plan.submits[0].params.n
        self._progress = [[_Progress() for _ in range(self._made)] for _ in plan.submits]
        self._prompt_entries: dict[int, list[TokenLogprobs | None]] = {}

    async def whole(self) -> Completion:
        """Wait for all continuations; of each prompt show the first, or the best, `n`."""
        joined: dict[tuple[int, int], CompletionChoice] = {}
        async for place, index, chunk in self._chunks():
            known = joined.get((place, index))
            if known is None:
                joined[place, index] = chunk
            else:
                _append(known, chunk)
        choices = []
        for place, progress in enumerate(self._progress):
            order = list(range(self._made))
            if self._made > self._plan.shown:
                order.sort(key=lambda index: progress[index].mean_logprob, reverse=True)
            for number, index in enumerate(order[: self._plan.shown]):
                choice = joined[place, index]
                choice.index = place * self._plan.shown + number
                if self._body.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_entries(self._prompt_entries[place])
                choices.append(choice)
        return self._wrapped(choices, self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """What comes, the ending of each choice once, usage if asked, [DONE]."""
        body = self._body
        not_yet = None if body.includes_usage else UNSET  # as OpenAI has it
        async for _, _, chunk in self._chunks():
            counts = self._usage() if body.continuous_usage else not_yet
            yield event_of(self._wrapped([chunk], counts))
        if body.includes_usage:
            yield event_of(self._wrapped([], self._usage()))
        yield DONE

    async def _chunks(self) -> AsyncGenerator[tuple[int, int, CompletionChoice], None]:
        """(prompt, continuation, what is new of it), as it comes."""
        needs_prompt = bool(self._body.echo) and self._plan.top_logprobs is not None
        async for place, delta in self._generation.deltas():
            if delta.prompt_logprobs is not None:
                self._prompt_entries[place] = delta.prompt_logprobs
            if not (delta.text or delta.token_ids or delta.finished):
                continue  # it says only that the prompt was accepted
            progress = self._progress[place][delta.index]
            progress.held.append(delta)
            if needs_prompt and place not in self._prompt_entries:
                continue
            for index, other in enumerate(self._progress[place]):
                held, other.held = other.held, []
                for each in held:
                    yield place, index, self._chunk(place, each, other)

    def _chunk(self, place: int, delta: Delta, progress: _Progress) -> CompletionChoice:
        plan, body = self._plan, self._body
        text, ids, entries = delta.text, delta.token_ids, delta.logprobs or []
        if plan.drops_output:
            text, ids, entries = "", [], []
        logprobs = None
        if plan.top_logprobs is not None:
            logprobs = CompletionLogprobs([], [], [], [])
        is_first, progress.has_begun = not progress.has_begun, True
        submit = plan.submits[place]
        if is_first and body.echo:
            text = plan.echoes[place] + text
            if logprobs is not None:
                known = self._prompt_entries[place]
                self._add(logprobs, submit.prompt_token_ids, known, progress)
        if logprobs is not None:
            self._add(logprobs, ids, entries, progress)
        if self._made > plan.shown:
            progress.tokens += len(ids)
            progress.logprob += sum(
                known[token].logprob for token, known in zip(ids, entries, strict=True)
            )
        ending = delta.finished
        stop_reason = None if ending is None else ending.stop_reason
        shows_ids = bool(body.return_token_ids)
        shows_states = bool(body.return_hidden_states) and ending is not None
        return CompletionChoice(
            index=place * self._made + delta.index,
            text=text,
            logprobs=logprobs,
            finish_reason=None if ending is None else ending.reason,
            stop_reason=stop_reason,
            matched_stop=stop_reason,
            token_ids=ids if shows_ids else UNSET,
            prompt_token_ids=submit.prompt_token_ids if shows_ids and is_first else UNSET,
            hidden_states=last_state(delta.hidden_states) if shows_states else UNSET,
        )

    def _add(
        self,
        told: CompletionLogprobs,
        ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        progress: _Progress,
    ) -> None:
        top = self._plan.top_logprobs or 0
        new, progress.offset = completion_entries(ids, entries, top, self._names, progress.offset)
        _extend(told, new)

    def _wrapped(
        self, choices: list[CompletionChoice], counts: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._generation.record.id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=counts,
        )

    def _usage(self) -> Usage:
        generation = self._generation
        made = 0 if self._plan.drops_output else generation.record.output_tokens
        return Usage.of(generation.prompt_tokens, made, generation.cached_tokens)


def _append(choice: CompletionChoice, chunk: CompletionChoice) -> None:
    choice.text += chunk.text
    choice.finish_reason = chunk.finish_reason
    choice.stop_reason = choice.matched_stop = chunk.stop_reason
    if choice.logprobs is not None and chunk.logprobs is not None:
        _extend(choice.logprobs, chunk.logprobs)
    if choice.token_ids is not UNSET and chunk.token_ids is not UNSET:
        choice.token_ids += chunk.token_ids
    choice.hidden_states = chunk.hidden_states


def _extend(told: CompletionLogprobs, new: CompletionLogprobs) -> None:
    told.tokens += new.tokens
    told.token_logprobs += new.token_logprobs
    told.top_logprobs += new.top_logprobs
    told.text_offset += new.text_offset
