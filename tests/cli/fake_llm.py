"""An `LLM` that says what the test tells it to, behind the same face."""

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.engine.outputs import CompletionOutput, Piece, RequestOutput
from headrace.request.outcome import Logprob
from headrace.request.sampling_params import SamplingParams


class FakeLLM:
    """Answers with `words`, one piece each; `calls` records what reached it."""

    def __init__(self, words: Sequence[str] = ("Hello", " there")) -> None:
        self.words = list(words)
        self.calls: list[tuple[str, Any, SamplingParams]] = []
        self.defaults = SamplingParams(temperature=0.5, top_k=7)
        self.ending, self.message = "stop", ""
        self.error: Exception | None = None
        self.on_piece: Any = None
        self.closed = self.aborted = False
        self.logprob = -0.5

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def get_default_sampling_params(self) -> SamplingParams:
        return self.defaults

    def stats(self) -> dict[str, Any]:
        refusals = ("", "decode_graph: not built")
        paths = [{"path": "eager", "refused": why, "steps": 3} for why in refusals]
        canary = {"compared": 6, "left_out": 0}
        return {"paths": paths, "kv_canary_violations": 0, "observers": {"numeric_canary": canary}}

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Piece]:
        self.calls.append(("stream", prompt, params))
        return self._pieces()

    def stream_chat(self, messages: Any, params: SamplingParams) -> Iterator[Piece]:
        self.calls.append(("stream_chat", [dict(message) for message in messages], params))
        if self.error is not None:
            raise self.error
        return self._pieces()

    def generate(self, prompts: Any, params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append(("generate", prompts, params))
        return [self._output(prompt, params.n) for prompt in prompts]

    def chat(self, messages: Any, params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append(("chat", messages, params))
        return [self._output(None, params.n) for _ in messages]

    def _pieces(self) -> Iterator[Piece]:
        try:
            for index, word in enumerate(self.words):
                if self.on_piece is not None:
                    self.on_piece(index)
                last = index == len(self.words) - 1
                yield Piece(
                    index=0,
                    text=word,
                    token_ids=[index],
                    logprobs=None,
                    finish_reason=self.ending if last else None,
                    message=self.message if last else "",
                )
        except GeneratorExit:
            self.aborted = True
            raise

    def _output(self, prompt: Any, count: int) -> RequestOutput:
        logprob = Logprob(self.logprob, 1, "Hello")
        return RequestOutput(
            request_id="0",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=[1, 2],
            outputs=[
                CompletionOutput(
                    index=index,
                    text="".join(self.words),
                    token_ids=[5, 6],
                    finish_reason=self.ending,
                    stop_reason=None,
                    logprobs=[{5: logprob}, {6: logprob}],
                    paths=[("eager", 2)],
                    message=self.message,
                )
                for index in range(count)
            ],
            prompt_logprobs=[None, {2: logprob}],
            cached_tokens=0,
        )
