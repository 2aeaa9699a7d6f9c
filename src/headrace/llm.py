"""`LLM`: offline generation and embeddings in Python."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.config.engine_config import EngineConfig
from headrace.engine.batch_arguments import (
    Message,
    Prompts,
    check_single,
    for_each,
    listed_conversations,
    listed_messages,
    listed_prompts,
    one_each,
)
from headrace.engine.batch_explanation import BatchExplanation
from headrace.engine.engine import Engine
from headrace.engine.expert_distribution import ExpertRecorder
from headrace.engine.explanation import Explanation, explanation_of
from headrace.engine.interrupts import interrupts_held
from headrace.engine.outputs import EmbeddingOutput, Piece, RequestOutput
from headrace.engine.progress import Progress
from headrace.engine.prompts import NO_TOKENIZER, Prompt
from headrace.engine.rehearsal import DryRequest, rehearse
from headrace.engine.requests import PreparedRequest, RequestHandle
from headrace.engine.turns import Turns
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams
from headrace.text.tokenizer import Tokenizer

log = get_logger(__name__)

Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model that is loaded and ready.

    Threads may share it: they take turns, step by step, and their requests run in one batch.

    Args:
        model: path of a folder or .gguf file, short name (`smollm2`) or hub id.
        show_progress: a bar while weights load.
        options: any other field of `EngineConfig`.

    Raises:
        HeadraceError: the model cannot be found, is not supported or does not fit, or an option
            cannot be honoured; says what, why and what to do.

    Example:
        with LLM("smollm2") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(
        self, model: str | os.PathLike[str], *, show_progress: bool = False, **options: Any
    ) -> None:
        self.config = EngineConfig(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model, **options
        )
        self._engine: Engine | None = Engine(self.config, progress=show_progress)
        self._turns = Turns()
        self._left: deque[str] = deque()  # requests whose callers went away

    # ---- generation and embeddings

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts; the results keep their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all or one per prompt; `None`: the model's defaults.
            use_tqdm: show a bar with tokens per second.

        Raises:
            RequestError: (a ValueError) a prompt or an option is invalid; names the prompt's index.
                Nothing ran.
        """
        listed = listed_prompts(prompts)
        params = self._params(sampling_params, len(listed))
        prepared = for_each(self.engine.prepare, listed, params)
        return [handle.output() for handle in self._run(prepared, use_tqdm)]

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Vectors of prompts, made of the model's last hidden states; the results keep their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            pooling_params: one for all or one per prompt; `None`: the last token's, normalised.

        Raises:
            RequestError: (a ValueError) a prompt or an option is invalid; names the prompt's index.
                Nothing ran.
        """
        listed = listed_prompts(prompts)
        asked = PoolingParams() if pooling_params is None else pooling_params
        params = one_each("pooling_params", asked, PoolingParams, len(listed))
        prepared = for_each(self.engine.prepare_embedding, listed, params)
        return [handle.embedding_output() for handle in self._run(prepared, use_tqdm)]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[Piece, None, None]:
        """Continue one prompt, piece by piece; the text of the pieces, joined, is the output's.

        The request is checked now and starts with the first piece. Leaving the iteration early
        aborts it. Hidden states, where they are asked, come with the last piece.
        """
        check_single(prompt)
        (params,) = self._params(sampling_params, 1)
        prepared = self.engine.prepare(prompt, params)
        prepared.wait()
        return self._stream(prepared)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
            messages: dicts with role and content.
            template: passed to the chat template (tools, add_generation_prompt, ...).

        Raises:
            RequestError: the model has no chat template, or it refuses the messages; names the
                conversation's index. Nothing ran.
        """
        batch = listed_conversations(messages)
        params = self._params(sampling_params, len(batch))
        prepared = for_each(partial(self._prepare_chat, template), batch, params)
        return [handle.output() for handle in self._run(prepared, use_tqdm)]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template: Any,
    ) -> Generator[Piece, None, None]:
        """Answer one conversation, piece by piece; see `stream`."""
        (params,) = self._params(sampling_params, 1)
        prepared = self._prepare_chat(template, messages, params)
        prepared.wait()
        return self._stream(prepared)

    # ---- knowing

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `RequestError` for a checkpoint without one."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError(NO_TOKENIZER, remedy="Work with token ids")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `None` stands for: the defaults of the checkpoint's generation config."""
        return self.engine.default_params

    @overload
    def explain(self) -> Explanation: ...
    @overload
    def explain(
        self, prompts: Prompts, sampling_params: Params | None = None
    ) -> BatchExplanation: ...
    def explain(
        self, prompts: Prompts | None = None, sampling_params: Params | None = None
    ) -> Explanation | BatchExplanation:
        """Without arguments: persona, plan, what was measured and where memory went.

        With those of `generate`: the steps that it would take, on which path each, and why not on a
        better one, as if the engine were idle, its prefix cache were empty and no stop token came.
        Nothing runs, is captured or counted.

        Raises:
            RequestError: a prompt or an option is invalid, as in `generate`.

        Example:
            print(llm.explain([[1] * 1024] * 32, SamplingParams(max_tokens=64, logprobs=5)))
            llm.explain("Hello").why_not("decode_graph")  # {"the step holds prompt tokens": 1}
        """
        engine = self.engine
        if prompts is None:
            if sampling_params is not None:
                raise RequestError("sampling_params came without prompts", remedy="Give both")
            return explanation_of(engine.settled, engine.worker.runner)
        listed = listed_prompts(prompts)
        if not listed:
            raise RequestError("No prompt was given", remedy="Give those of a call of generate")
        params = self._params(sampling_params, len(listed))
        return rehearse(engine, for_each(partial(DryRequest.of, engine), listed, params))

    def stats(self) -> dict[str, Any]:
        """Counters since the start (steps by path and reason, tokens, endings) and memory now."""
        with self._turn():
            return self.engine.stats()

    def start_expert_distribution(self, mode: str | None = None) -> None:
        """Record how tokens are spread over experts, from the next forward on.

        What was recorded and not dumped is forgotten.

        Args:
            mode: "stat" (sums), "per_pass" (counts of every forward) or "per_token" (the experts of
                every token); `None`: `expert_distribution_recorder_mode` of the start.

        Raises:
            RequestError: another mode, a model without experts, or one started without the
                recorder.
        """
        with self._turn():
            ExpertRecorder(self.engine).start(mode)

    def stop_expert_distribution(self) -> None:
        """Record no more; what was recorded waits to be dumped.

        Raises:
            RequestError: nothing is recorded.
        """
        with self._turn():
            ExpertRecorder(self.engine).stop()

    def dump_expert_distribution(self, folder: str | os.PathLike[str]) -> Path:
        """Write what was recorded into a new file of the folder, and begin anew.

        Returns: the file, for `torch.load`; docs/experts.md says what it holds.

        Raises:
            RequestError: nothing was recorded, or it cannot be written.
        """
        with self._turn():
            return Path(ExpertRecorder(self.engine).dump(folder)["path"])

    # ---- watching

    def start_profile(
        self,
        folder: str | os.PathLike[str],
        *,
        steps: int | None = None,
        stage: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Profile the next steps into a Chrome trace (Perfetto and chrome://tracing read it).

        Args:
            folder: where the trace goes; made when missing.
            steps: how many; `None`: until `stop_profile`.
            stage: "prefill" or "decode": begins with a step of that kind, ends with another.
            options: start_step, activities, with_stack, record_shapes, prefix, stages: see
                `StepProfiler.start`.

        Returns: "path" of the trace, which is written when the profile ends.

        Raises:
            RequestError: a profile runs already, or what was asked cannot be done.
        """
        if stage is not None:
            if "stages" in options:
                raise RequestError("stage and stages were both given", remedy="Give one of them")
            options["stages"] = (stage,)
        with self._turn():
            return self.engine.profiler.start(folder, steps, **options)

    def stop_profile(self) -> dict[str, Any]:
        """End the profile and write its trace; where it is.

        Raises:
            RequestError: none runs, or none of its steps came.
        """
        with self._turn():
            return self.engine.profiler.stop()

    @contextmanager
    def dump(
        self,
        folder: str | os.PathLike[str],
        *,
        layers: Iterable[int] | None = None,
        names: Iterable[str] = ("k", "v", "logits"),
        steps: int | None = None,
        eager: bool = False,
    ) -> Iterator[None]:
        """Within: write the tensors of the steps that run to `folder`, a safetensors file a step.

        `headrace diff A B` compares two dumps.

        Args:
            folder: made when missing; must hold no dump yet.
            layers: whose; `None`: of all.
            names: of k and v (what a layer wrote to the KV pool), logits, and stream (what it left
                between itself and the next).
            steps: how many at most.
            eager: run every step eagerly meanwhile, which stream needs where there are other paths.

        Raises:
            RequestError: a dump runs already, or what was asked cannot be had; at the end, that it
                could not be written.

        Example:
            with llm.dump("eager", names=("k", "v", "stream", "logits"), eager=True):
                llm.generate("The capital of France is")
        """
        with self._turn():
            engine = self.engine
            engine.dumper.start(folder, layers=layers, names=names, steps=steps, eager=eager)
        try:
            yield
        except BaseException:
            self._end_dump(engine, is_heard=False)
            raise
        self._end_dump(engine, is_heard=True)

    # ---- end

    def close(self) -> None:
        """Abort what runs and give the model's memory back. Closing twice is fine."""
        with self._turns:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine underneath; raises `RequestError` after `close`."""
        if self._engine is None:
            raise RequestError("This LLM is closed", remedy="Make a new one")
        return self._engine

    # ---- inside

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the engine for this thread alone."""
        try:
            with self._turns:
                yield
        finally:
            self._abort_left()

    def _end_dump(self, engine: Engine, *, is_heard: bool) -> None:
        """`is_heard`: else somebody raises what matters more than that the dump failed."""
        try:
            with self._turn():
                engine.settle()
                engine.dumper.stop()
        except RequestError as error:
            if is_heard:
                raise
            log.error("%s", error)

    def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool) -> list[RequestHandle]:
        """Run requests to their ends."""
        for_each(PreparedRequest.wait, prepared)  # for grammars, compiled side by side until now
        handles: list[RequestHandle] = []
        try:
            with interrupts_held(), self._turn():
                handles += map(self.engine.submit, prepared)
            running = {handle.request_id: handle for handle in handles}
            with interrupts_held() as held, Progress(len(handles), shown=use_tqdm) as progress:
                for handle in handles:
                    while not handle.is_finished:
                        ended = self._step(handle)
                        held.raise_pressed()
                        progress.count([own for own in ended if running.pop(own.request_id, None)])
                progress.count(running.values())  # these ended in steps of other threads
        except BaseException:
            self._leave(handles)
            raise
        return handles

    def _stream(self, prepared: PreparedRequest) -> Generator[Piece, None, None]:
        handles: list[RequestHandle] = []
        try:
            with interrupts_held(), self._turn():
                handles.append(self.engine.submit(prepared))
            (handle,) = handles
            is_finished = False
            while not is_finished:
                self._step(handle)
                with self._turn():
                    is_finished, pieces = handle.is_finished, handle.take_pieces()
                yield from pieces
        finally:
            self._leave(handles)

    def _step(self, handle: RequestHandle) -> list[RequestHandle]:
        """One step, unless the request has ended meanwhile: by another thread, or by `close`."""
        with self._turn():
            return [] if handle.is_finished else self.engine.step()

    def _leave(self, handles: Sequence[RequestHandle]) -> None:
        """Abort what has not ended.

        Never waits: the garbage collector may end a stream in the middle of anything, a turn of
        this very thread included. Who has the turn sees to it at its end.
        """
        self._left.extend(handle.request_id for handle in handles if not handle.is_finished)
        self._abort_left()

    def _abort_left(self) -> None:
        while self._left and self._turns.take_if_free():
            try:
                left = [self._left.popleft() for _ in range(len(self._left))]
                if self._engine is not None:
                    self._engine.abort(left)
            finally:
                self._turns.give_back()

    def _prepare_chat(
        self, template: Mapping[str, Any], messages: Sequence[Message], params: SamplingParams
    ) -> PreparedRequest:
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(listed_messages(messages), **template)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return self.engine.prepare(ids, params, text=text, default_max_tokens=None)

    def _params(self, params: Params | None, count: int) -> list[SamplingParams]:
        asked = self.engine.default_params if params is None else params
        return one_each("sampling_params", asked, SamplingParams, count)
