"""Chat replies, whole and streamed, from the deltas of a generation."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from headrace.request.messages import Delta
from headrace.serving.event_stream import DONE, event_of
from headrace.serving.generation import Generation
from headrace.serving.hidden_states import State, last_state
from headrace.serving.openai.chat_plan import ChatPlan
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.logprobs import TokenNames, chat_entries, prompt_entries
from headrace.serving.openai.message_pieces import (
    MessageBuilder,
    MessagePiece,
    OutputInterpreter,
    deltas_of,
)
from headrace.serving.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    PromptLogprobs,
    Usage,
)


@dataclass(slots=True)
class _Choice:
    """One choice on its way."""

    interpreter: OutputInterpreter
    message: MessageBuilder = field(default_factory=MessageBuilder)
    entries: ChatLogprobs = field(default_factory=lambda: ChatLogprobs([]))
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    stop_reason: int | str | None = None
    state: State | None = None


class ChatReply:
    """Makes the reply to one request.

    Args:
        model: the name to answer with.
    """

    def __init__(
        self, body: ChatRequest, plan: ChatPlan, generation: Generation, model: str
    ) -> None:
        service = generation.service
        self._body, self._plan, self._generation = body, plan, generation
        self._model, self._fingerprint = model, service.fingerprint
        self._created = int(time.time())
        self._names = TokenNames(service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._choices = [_Choice(plan.interpreter()) for _ in range(plan.submit.params.n)]
        self._prompt_logprobs: PromptLogprobs | None = None

    async def whole(self) -> ChatCompletion:
        """Wait for all choices."""
        async for _, delta in self._generation.deltas():
            choice = self._choices[delta.index]
            choice.message.add(self._read(choice, delta))
            choice.token_ids += delta.token_ids
            new = self._entries(delta)
            choice.entries.content += new.content if new else ()
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = prompt_entries(delta.prompt_logprobs)
        body = self._body
        return ChatCompletion(
            id=self._generation.record.id,
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(*each) for each in enumerate(self._choices)],
            usage=self._usage(),
            system_fingerprint=self._fingerprint,
            prompt_logprobs=UNSET if self._prompt_logprobs is None else self._prompt_logprobs,
            prompt_token_ids=self._plan.submit.prompt_token_ids if body.return_token_ids else UNSET,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The role of each choice, what comes, the ending of each once, usage if asked, [DONE]."""
        body = self._body
        prompt_ids = self._plan.submit.prompt_token_ids if body.return_token_ids else UNSET
        for index in range(len(self._choices)):
            opening = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            yield self._event(opening, prompt_ids)
            prompt_ids = UNSET
        async for _, delta in self._generation.deltas():
            for chunk in self._chunks(delta):
                yield self._event(chunk)
        if body.includes_usage:
            yield event_of(self._wrapped([], self._usage()))
        yield DONE

    def _chunks(self, delta: Delta) -> list[ChatChunkChoice]:
        """What there is to show of a delta, if anything; tokens with the first chunk, the ending
        with the last."""
        choice = self._choices[delta.index]
        piece, entries = self._read(choice, delta), self._entries(delta)
        shows_ids = bool(self._body.return_token_ids)
        if not (piece or entries or delta.finished or (shows_ids and delta.token_ids)):
            return []
        chunks = [ChatChunkChoice(index=delta.index, delta=each) for each in deltas_of(piece)]
        first, last = chunks[0], chunks[-1]
        first.logprobs = entries
        first.token_ids = delta.token_ids if shows_ids else UNSET
        if delta.finished is not None:
            last.finish_reason = choice.reason
            last.stop_reason = last.matched_stop = choice.stop_reason
            if self._body.return_hidden_states:
                last.delta.hidden_states = choice.state
        return chunks

    def _read(self, choice: _Choice, delta: Delta) -> MessagePiece:
        ending = delta.finished
        piece = choice.interpreter.read(delta.text, delta.token_ids, is_last=ending is not None)
        if ending is not None:
            choice.reason = choice.interpreter.finish_reason(ending.reason)
            choice.stop_reason = ending.stop_reason
            choice.state = last_state(delta.hidden_states)
        return piece

    def _entries(self, delta: Delta) -> ChatLogprobs | None:
        top = self._plan.top_logprobs
        if top is None or not delta.logprobs:
            return None
        return ChatLogprobs(chat_entries(delta.token_ids, delta.logprobs, top, self._names))

    def _whole_choice(self, index: int, choice: _Choice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=choice.message.message(),
            logprobs=None if self._plan.top_logprobs is None else choice.entries,
            finish_reason=choice.reason,
            stop_reason=choice.stop_reason,
            matched_stop=choice.stop_reason,
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
            hidden_states=choice.state if self._body.return_hidden_states else UNSET,
        )

    def _event(self, choice: ChatChunkChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        body = self._body
        not_yet = None if body.includes_usage else UNSET  # as OpenAI has it
        counts = self._usage() if body.continuous_usage else not_yet
        chunk = self._wrapped([choice], counts)
        chunk.prompt_token_ids = prompt_ids
        return event_of(chunk)

    def _wrapped(
        self, choices: list[ChatChunkChoice], counts: Usage | UnsetType | None
    ) -> ChatChunk:
        return ChatChunk(
            id=self._generation.record.id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=counts,
        )

    def _usage(self) -> Usage:
        generation = self._generation
        counts = [choice.interpreter.reasoning_tokens for choice in self._choices]
        known = [count for count in counts if count is not None]
        return Usage.of(
            generation.prompt_tokens,
            generation.record.output_tokens,
            generation.cached_tokens,
            sum(known) if len(known) == len(counts) else None,
        )
