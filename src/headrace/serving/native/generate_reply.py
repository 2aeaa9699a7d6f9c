"""Native replies: {text, output_ids, meta_info}. In a stream they grow, as SGLang's do."""

import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.request.messages import Delta, TokenLogprobs
from headrace.request.outcome import Finished, Logprob
from headrace.request.packed_states import PackedStates
from headrace.serving.event_stream import DONE, event_of
from headrace.serving.generation import Generation
from headrace.serving.hidden_states import states_of
from headrace.serving.native.generate_plan import GeneratePlan, LogprobsAsked
from headrace.serving.openai.logprobs import Entries, likeliest

Triple = tuple[float | None, int, str | None]  # logprob, token id, its text if asked


@dataclass(slots=True)
class _Choice:
    """All that is known of one continuation so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    states: PackedStates | None = None
    routed_experts: bytes | None = None


class GenerateReply:
    """Makes the reply to one request. Choices are numbered prompt * n + continuation."""

    def __init__(self, plan: GeneratePlan, generation: Generation) -> None:
        self._plan, self._generation = plan, generation
        self._choices = [[_Choice() for _ in range(each.params.n)] for each in plan.submits]
        self._prompt_entries: dict[int, list[TokenLogprobs | None]] = {}
        self._is_list = plan.is_batch or any(each.params.n > 1 for each in plan.submits)

    async def whole(self) -> Any:
        async for place, delta in self._generation.deltas():
            self._take(place, delta)
        told = [
            self._told(place, index)
            for place, choices in enumerate(self._choices)
            for index in range(len(choices))
        ]
        return told if self._is_list else told[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        async for place, delta in self._generation.deltas():
            self._take(place, delta)
            if not (delta.token_ids or delta.text or delta.finished):
                continue
            told = self._told(place, delta.index)
            if self._is_list:
                before = sum(len(choices) for choices in self._choices[:place])
                told["index"] = before + delta.index
            yield event_of(told)
        yield DONE

    def _take(self, place: int, delta: Delta) -> None:
        choice = self._choices[place][delta.index]
        if self._plan.drops_output[place]:
            delta = _without_output(delta)
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or []
        choice.finished, choice.states = delta.finished, delta.hidden_states
        choice.routed_experts = delta.routed_experts
        if delta.prompt_logprobs is not None:
            self._prompt_entries[place] = delta.prompt_logprobs

    def _told(self, place: int, index: int) -> dict[str, Any]:
        choice = self._choices[place][index]
        prompt_tokens, cached_tokens = self._generation.of_prompt(place)
        meta: dict[str, Any] = {
            "id": self._plan.rids[place],
            "finish_reason": _finish_reason(choice),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": cached_tokens,
            "e2e_latency": time.monotonic() - self._generation.record.started,
            "weight_version": "default",
        }
        asked = self._plan.logprobs[place]
        if asked is not None:
            meta |= self._logprobs(place, choice, asked)
        if choice.states is not None:
            meta["hidden_states"] = self._states(place, choice.states)
        if choice.routed_experts is not None:  # int32, [rows, layers with experts, k]
            meta["routed_experts"] = b64encode(choice.routed_experts).decode()
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _states(self, place: int, packed: PackedStates) -> list[Any]:
        """SGLang's form: a list of states for the prompt, then the state of each output token that
        was read; where only states of output tokens are asked, one for each."""
        states: list[Any] = states_of(packed)
        if self._plan.submits[place].params.return_hidden_states != "all":
            return states
        length = self._generation.of_prompt(place)[0]
        return [states[:length], *states[length:]]

    def _logprobs(self, place: int, choice: _Choice, asked: LogprobsAsked) -> dict[str, Any]:
        ids: Sequence[int] = ()
        known: Sequence[TokenLogprobs | None] = ()
        if asked.start is not None:
            ids = self._plan.submits[place].prompt_token_ids[asked.start :]
            known = self._prompt_entries.get(place, [])[asked.start :]
        told: dict[str, Any] = {}
        for side, tokens, entries in (
            ("input", ids, known),
            ("output", choice.token_ids, choice.logprobs),
        ):
            told[f"{side}_token_logprobs"] = [
                _triple(token, None if each is None else each[token], asked)
                for token, each in zip(tokens, entries, strict=True)
            ]
            if asked.top:
                told[f"{side}_top_logprobs"] = [
                    None if each is None else _triples(likeliest(each, asked.top), asked)
                    for each in entries
                ]
            if asked.ids:
                told[f"{side}_token_ids_logprobs"] = [_by_id(each, asked) for each in entries]
        return told


def _without_output(delta: Delta) -> Delta:
    ending = delta.finished
    if ending is not None and ending.reason == "stop":
        ending = Finished("length")
    return msgspec.structs.replace(delta, text="", token_ids=[], logprobs=None, finished=ending)


def _finish_reason(choice: _Choice) -> dict[str, Any] | None:
    ending = choice.finished
    if ending is None:
        return None
    if ending.reason == "stop":
        last = choice.token_ids[-1] if choice.token_ids else None
        return {
            "type": "stop",
            "matched": last if ending.stop_reason is None else ending.stop_reason,
        }
    if ending.reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": ending.reason, "message": ending.message}


def _triple(token_id: int, entry: Logprob | None, asked: LogprobsAsked) -> Triple:
    text = entry.decoded_token if asked.with_text and entry is not None else None
    return (None if entry is None else entry.finite, token_id, text)


def _triples(items: Sequence[tuple[int, Logprob]], asked: LogprobsAsked) -> list[Triple]:
    return [_triple(token_id, entry, asked) for token_id, entry in items]


def _by_id(entries: Entries | None, asked: LogprobsAsked) -> list[Triple] | None:
    """The ids asked by name; those of prompts have them only where they are known."""
    if entries is None:
        return None
    return _triples([(each, entries[each]) for each in asked.ids if each in entries], asked)
