"""`LLM`: offline generation and embeddings in Python."""

import os
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from headrace.base.errors import RequestError, UnknownFieldError
from headrace.base.unknown_names import arguments_answered, attributes_answered
from headrace.config.engine_config import EngineConfig
from headrace.engine.batch_arguments import (
    Message,
    Params,
    Prompts,
    check_single,
    check_template_variables,
    for_each,
    listed_conversations,
    listed_messages,
    listed_prompts,
    one_each,
)
from headrace.engine.other_words import GENERATE_WORDS, LLM_WORDS
from headrace.engine.outputs import EmbeddingOutput, Piece, RequestOutput
from headrace.engine.prompts import NO_TOKENIZER, Prompt
from headrace.engine.requests import PreparedRequest
from headrace.engine.shared_engine import SharedEngine
from headrace.engine.watching import Watching
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams
from headrace.text.tokenizer import Tokenizer


@attributes_answered(LLM_WORDS)
class LLM(Watching):
    """A model that is loaded and ready.

    Threads may share it: they take turns, step by step, and their requests run in one batch. What
    shows its work (`explain`, `stats`, `start_profile`, `dump`, ...) is in `Watching`.

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
        super().__init__(SharedEngine(self.config, show_progress=show_progress))

    # ---- generation and embeddings

    @arguments_answered(GENERATE_WORDS, "argument of generate", UnknownFieldError)
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
        return [handle.output() for handle in self._shared.run(prepared, bar=use_tqdm)]

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
            pooling_params: one for all or one per prompt; `None`: pooled as the checkpoint states,
                by the last token where it states nothing, and normalised.

        Raises:
            RequestError: as `generate`.
        """
        listed = listed_prompts(prompts)
        params = one_each("pooling_params", pooling_params, PoolingParams(), len(listed))
        prepared = for_each(self.engine.prepare_embedding, listed, params)
        return [handle.embedding_output() for handle in self._shared.run(prepared, bar=use_tqdm)]

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
        return self._shared.stream(prepared)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
            messages: dicts with role and content.
            chat_template: one to take in place of the model's, its text in Jinja.
            template: passed to the chat template (tools, add_generation_prompt, ...).

        Raises:
            RequestError: the model has no chat template, or it refuses the messages; names the
                conversation's index. Nothing ran.
        """
        check_template_variables(template)
        batch = listed_conversations(messages)
        params = self._params(sampling_params, len(batch))
        prepare = partial(self._prepare_chat, self._chat_tokenizer(chat_template), template)
        prepared = for_each(prepare, batch, params)
        return [handle.output() for handle in self._shared.run(prepared, bar=use_tqdm)]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        **template: Any,
    ) -> Generator[Piece, None, None]:
        """Answer one conversation, piece by piece; see `stream`."""
        check_template_variables(template)
        (params,) = self._params(sampling_params, 1)
        tokenizer = self._chat_tokenizer(chat_template)
        prepared = self._prepare_chat(tokenizer, template, messages, params)
        prepared.wait()
        return self._shared.stream(prepared)

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

    # ---- end

    def close(self) -> None:
        """Abort what runs and give the model's memory back. Closing twice is fine."""
        self._shared.close()

    def __reduce__(self) -> NoReturn:
        raise RequestError(
            "An LLM cannot be pickled or copied",
            why="its model, memory and threads stay in the process that made it",
            remedy="Make it where it is used, or start a server and send requests there",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside

    def _params(self, params: Params | None, count: int) -> list[SamplingParams]:
        return one_each("sampling_params", params, self.engine.default_params, count)

    def _chat_tokenizer(self, chat_template: str | None) -> Tokenizer:
        tokenizer = self.get_tokenizer()
        return tokenizer if chat_template is None else tokenizer.with_chat_template(chat_template)

    def _prepare_chat(
        self,
        tokenizer: Tokenizer,
        template: Mapping[str, Any],
        messages: Sequence[Message],
        params: SamplingParams,
    ) -> PreparedRequest:
        text = tokenizer.apply_chat_template(listed_messages(messages), **template)
        if template.get("tools") and "tools" not in tokenizer.template_variables:
            raise RequestError(
                "tools were given",
                why="the chat template does not show them, so the model would never see them",
                remedy="Leave them out, or give a chat_template that shows them",
            )
        ids = tokenizer.encode(text, add_special_tokens=False)
        return self.engine.prepare(ids, params, text=text, default_max_tokens=None)
