"""`LLM`: offline generation in Python."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from headrace.base.errors import RequestError
from headrace.config.engine_config import EngineConfig
from headrace.engine.engine import DEFAULT_MAX_TOKENS, Engine, RequestHandle
from headrace.engine.explanation import Explanation, explanation_of
from headrace.engine.outputs import Piece, RequestOutput
from headrace.engine.prompts import NO_TOKENIZER, Prompt
from headrace.request.sampling_params import SamplingParams
from headrace.text.tokenizer import Tokenizer

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams]
Message = Mapping[str, Any]


class LLM:
    """A model that is loaded and ready.

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

    def __init__(self, model: str, *, show_progress: bool = False, **options: Any) -> None:
        unknown = sorted(set(options) - set(EngineConfig.field_help()))
        if unknown:
            raise TypeError(f"LLM got unknown options: {', '.join(unknown)}")
        self.config = EngineConfig(model=str(model), **options)
        self._engine: Engine | None = Engine(self.config, progress=show_progress)

    # ---- generation

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
        listed = _listed(prompts)
        params = self._params(sampling_params, len(listed))
        return self._run(listed, params, DEFAULT_MAX_TOKENS, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Piece]:
        """Continue one prompt, piece by piece. Leaving the iteration early aborts the request."""
        params = sampling_params or self.engine.default_params
        return self._stream(prompt, params, DEFAULT_MAX_TOKENS)

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
            RequestError: the model has no chat template, or it refuses the messages.
        """
        batch = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._render(conversation, template) for conversation in batch]  # type: ignore[arg-type]
        params = self._params(sampling_params, len(prompts))
        return self._run(prompts, params, None, use_tqdm)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template: Any,
    ) -> Iterator[Piece]:
        """Answer one conversation, piece by piece."""
        params = sampling_params or self.engine.default_params
        return self._stream(self._render(messages, template), params, None)

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

    def explain(self) -> Explanation:
        """Persona, plan, what was measured and where memory went."""
        return explanation_of(self.engine.settled, self.engine.worker.runner)

    def stats(self) -> dict[str, Any]:
        """Counters since the start (steps by path and reason, tokens, endings) and memory now."""
        return self.engine.stats()

    # ---- end

    def close(self) -> None:
        """Abort what runs and give the model's memory back. Closing twice is fine."""
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

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        default_max_tokens: int | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        engine = self.engine
        ids = [
            _with_index(index, engine.check, prompt, each)
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        handles: list[RequestHandle] = []
        try:
            for prompt, own_ids, each in zip(prompts, ids, params, strict=True):
                text = prompt if isinstance(prompt, str) else None
                handles.append(
                    engine.add(own_ids, each, text=text, default_max_tokens=default_max_tokens)
                )
            with tqdm(total=len(handles), desc="Processed prompts", disable=not use_tqdm) as bar:
                while not all(handle.is_finished for handle in handles):
                    bar.update(len(engine.step()))
        except BaseException:
            self._abort(handles)
            raise
        return [handle.output() for handle in handles]

    def _stream(
        self, prompt: Prompt, params: SamplingParams, default_max_tokens: int | None
    ) -> Iterator[Piece]:
        engine = self.engine
        handle = engine.add(prompt, params, default_max_tokens=default_max_tokens)

        def pieces() -> Iterator[Piece]:
            try:
                while not handle.is_finished:
                    engine.step()
                    yield from handle.take_pieces()
            finally:
                self._abort([handle])

        return pieces()

    def _abort(self, handles: Sequence[RequestHandle]) -> None:
        engine = self.engine
        for handle in handles:
            engine.abort(handle.request_id)
        engine.settle()

    def _render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, **template)
        return tokenizer.encode(text, add_special_tokens=False)

    def _params(self, params: Params | None, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.engine.default_params] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(
                f"{count} prompts came with {len(params)} sampling params",
                remedy="Give one for all, or one per prompt",
            )
        return list(params)


def _listed(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _with_index(index: int, check: Any, prompt: Prompt, params: SamplingParams) -> list[int]:
    try:
        return check(prompt, params)  # type: ignore[no-any-return]
    except RequestError as error:
        raise RequestError(
            f"Prompt {index}: {error.what}", why=error.why, remedy=error.remedy
        ) from error
