"""An engine that says what the test tells it to, behind the face of `EngineClient`."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import numpy as np

from headrace.base.errors import EngineDeadError, HeadraceError
from headrace.request.messages import Delta, EngineInfo, Load, Submit
from headrace.request.outcome import Finished, Logprob
from headrace.request.packed_states import PackedStates
from headrace.request.sampling_params import SamplingParams

VOCAB = 272
INFO = EngineInfo(
    model="tiny",
    model_path="/models/tiny",
    summary="cpu, float32",
    architecture="llama",
    device="cpu",
    dtype="float32",
    max_model_len=1024,
    vocab_size=VOCAB,
    num_layers=2,
    hidden_size=4,
    eos_token_ids=[257],
    default_params=SamplingParams(temperature=0.5, top_k=7),
    sampling_defaults="sampling_defaults = {...}",
    is_generation=True,
    has_tokenizer=True,
    kv_tokens=4096,
    page_size=16,
    max_running_requests=16,
    start_seconds=1.5,
    pid=1,
)

STATS: dict[str, Any] = {
    "steps": 12,
    "prompt_tokens": 30,
    "paths": [
        {"path": "decode_graph", "refused": "", "steps": 9},
        {"path": "eager", "refused": "decode_graph: the step holds prompt tokens", "steps": 3},
    ],
    "path_seconds": {"decode_graph": 0.5, "eager": 0.25},
}
STEPS: dict[str, Any] = {
    "fields": [
        *("number", "at", "seconds", "path", "refused"),
        *("sequences", "prompt_tokens", "decode_tokens", "bucket_tokens", "bucket_sequences"),
    ],
    "reasons": [[["decode_graph", "the step holds prompt tokens", ""]], []],
    "steps": [
        [1, 1.7e9, 0.02, "eager", 0, 2, 17, 1, 18, 2],
        [2, 1.7e9, 0.004, "decode_graph", 1, 3, 0, 3, 4, 4],
    ],
}


def logprobs_of(token: int, top: int) -> dict[int, Logprob]:
    """The chosen token has rank 2, so that with top 1 another one is shown beside it."""
    entries = {token: Logprob(-1.5, 2, chr(33 + token) if token < 94 else None)}
    entries |= {
        other: Logprob(-0.5 - rank, rank, chr(33 + other))
        for rank, other in enumerate((1, 2, 3)[:top], 1)
        if other != token and rank != 2
    }
    return entries


def packed_states(submit: Submit, tokens: int) -> PackedStates | None:
    """In row i, bfloat16: i, then the layer so often as there is room for."""
    params, width = submit.params, INFO.hidden_size
    if not params.wants_hidden_states:
        return None
    layers = params.state_layers(INFO.num_layers)
    first = 0 if params.return_hidden_states == "all" else len(submit.prompt_token_ids) - 1
    places = range(len(submit.prompt_token_ids) - 1 + tokens - first)
    if params.return_hidden_states == "final":
        first, places = first + places[-1], places[-1:]
    rows = len(places)
    numbers = np.array(
        [[[row] + [layer] * (width - 1) for layer in layers] for row in places], np.float32
    )
    halves = (numbers.view(np.uint32) >> 16).astype("<u2")
    return PackedStates(bytearray(halves.tobytes()), rows, width, "bfloat16", first, layers)


class FakeEngine:
    """Continues every prompt with `words`, one token per character, one delta per word.

    Attributes:
        finished: ending of every continuation; "length" when max_tokens comes first.
        refuse: raised in place of the acceptance.
        hold: waited for between acceptance and the first token.
        die_after, fail_after: words after which the engine dies, or the step fails.
        pause: seconds between deltas.
        replies: to controls by name. control_hold: waited for before a reply.
        submits, aborted: what came, and ids left before their end or aborted.
    """

    def __init__(self, words: Iterable[str] = ("Hel", "lo", " you")) -> None:
        self.words = list(words)
        self.info = INFO
        self.state = "ready"
        self.death = ""
        self.silent_seconds = 0.0
        self.load = Load(running=1, waiting=2, pages_total=10, pages_free=9)
        self.finished = Finished("stop")
        self.refuse: Callable[[Submit], HeadraceError | None] = lambda submit: None
        self.hold: asyncio.Event | None = None
        self.die_after = self.fail_after = -1
        self.pause = 0.0
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.control_error: HeadraceError | None = None
        self.control_hold: asyncio.Event | None = None
        self.replies: dict[str, dict[str, Any]] = {"stats": dict(STATS), "steps": dict(STEPS)}
        self.restarts = 0
        self.sent = 0

    @property
    def params(self) -> SamplingParams:
        """Those of the last request."""
        return self.submits[-1].params

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        refusal = self.refuse(submit)
        if refusal is not None:
            raise refusal
        self.submits.append(submit)
        ended = False
        try:
            yield Delta(submit.request_id, prompt_tokens=len(submit.prompt_token_ids))
            if self.hold is not None:
                await self.hold.wait()
            for place, word in enumerate(self.words):
                if place == self.die_after:
                    raise EngineDeadError("The engine ended while it ran", why="killed")
                if submit.request_id in self.aborted:
                    for index in range(submit.params.n):
                        yield Delta(submit.request_id, index=index, finished=Finished("abort"))
                    ended = True
                    return
                for index in range(submit.params.n):
                    yield self._delta(submit, place, word, index)
                if place == self.fail_after:
                    ending = Finished("error", message="the step broke")
                    for index in range(submit.params.n):
                        yield Delta(submit.request_id, index=index, finished=ending)
                    ended = True
                    return
                await asyncio.sleep(self.pause)
            ended = True
        finally:
            if not ended:
                self.aborted.append(submit.request_id)

    def _delta(self, submit: Submit, place: int, word: str, index: int) -> Delta:
        params = submit.params
        is_last = place == len(self.words) - 1
        ids = [ord(character) - 33 if character != " " else 220 for character in word]
        ending = self.finished if is_last else None
        prompt = None
        if params.prompt_logprobs is not None and place == 0 and index == 0:
            known = submit.prompt_token_ids[1:]
            prompt = [None, *(logprobs_of(token, params.prompt_logprobs) for token in known)]
        self.sent += 1
        return Delta(
            submit.request_id,
            index=index,
            text=word,
            token_ids=ids,
            logprobs=None
            if params.logprobs is None
            else [logprobs_of(token, params.logprobs) for token in ids],
            prompt_logprobs=prompt,
            finished=ending,
            prompt_tokens=len(submit.prompt_token_ids),
            cached_tokens=1,
            paths=[("eager", place + 1)] if ending else [],
            hidden_states=packed_states(submit, len("".join(self.words))) if ending else None,
        )

    async def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    async def control(self, name: str, **arguments: Any) -> dict[str, Any]:
        self.controls.append((name, arguments))
        if self.control_error is not None:
            raise self.control_error
        if self.control_hold is not None:
            await self.control_hold.wait()
        return self.replies.get(name, {"name": name})
