"""The text side of one sequence: takes tokens from the scheduler, gives pieces and an output."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.outputs import CompletionOutput, Piece
from headrace.engine.token_states import TokenStates
from headrace.request.outcome import Finished, Logprob
from headrace.request.packed_states import PackedStates
from headrace.request.request import Request
from headrace.text.output_text import OutputText
from headrace.text.tokenizer import Tokenizer


class SequenceOutput:
    """A `TokenSink`.

    Args:
        index: which of the request's n continuations.
        tokenizer: `None` for a checkpoint without one.
        stop_ids: ids that end the sequence; they show in the text where the request includes stops.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        stop_ids: frozenset[int],
    ) -> None:
        params = request.params
        wants_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if wants_logprobs else None
        self.prompt_entries: list[dict[int, Logprob] | None] | None = None
        self.ending: Finished | None = None
        self.vector: NDArray[np.float32] | None = None
        self.states: TokenStates | None = None
        self.routing: NDArray[np.int32] | None = None
        self._text = _text_of(request, tokenizer)
        self._hidden_ids = frozenset() if params.include_stop_str_in_output else stop_ids
        self._shown: list[str] = []
        self._taken_texts = self._taken_tokens = 0
        self._prompt_taken = self._ending_taken = False

    # ---- from the scheduler

    def token(self, token_id: int, logprobs: dict[int, Logprob] | None) -> str | None:
        self.token_ids.append(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if self._text is None or token_id in self._hidden_ids:
            return None
        self._shown.append(self._text.push(token_id))
        return self._text.stopped

    def prompt_logprobs(self, entries: Sequence[dict[int, Logprob] | None]) -> None:
        self.prompt_entries = list(entries)

    def embedding(self, vector: NDArray[np.float32]) -> None:
        self.vector = vector

    def hidden_states(self, states: PackedStates) -> None:
        self.states = TokenStates(states)

    def routed_experts(self, ids: NDArray[np.int32]) -> None:
        self.routing = ids

    def finished(self, ending: Finished) -> None:
        assert self.ending is None, "a sequence ends once"
        self.ending = ending
        if self._text is not None:
            self._shown.append(self._text.finish())
            stopped = self._text.stopped
            if stopped is not None and ending.reason == "length":
                self.ending = Finished("stop", stop_reason=stopped)  # by the held tail

    # ---- to the caller

    def take_piece(self) -> Piece | None:
        """What is new since the last call; `None` when nothing is. The ending comes once, last."""
        texts, tokens, ending = self._taken_texts, self._taken_tokens, self.ending
        is_new = tokens < len(self.token_ids) or texts < len(self._shown)
        if not is_new and (ending is None or self._ending_taken):
            return None
        self._taken_texts, self._taken_tokens = len(self._shown), len(self.token_ids)
        self._ending_taken = ending is not None
        prompt_entries = None if self._prompt_taken else self.prompt_entries
        self._prompt_taken = True
        return Piece(
            index=self.index,
            text="".join(self._shown[texts:]),
            token_ids=self.token_ids[tokens:],
            logprobs=None if self.logprobs is None else self.logprobs[tokens:],
            prompt_logprobs=prompt_entries,
            finish_reason=ending.reason if ending else None,
            stop_reason=ending.stop_reason if ending else None,
            message=ending.message if ending else "",
            embedding=self.vector,
            hidden_states=self.states,
            routed_experts=self.routing,
        )

    def output(self, paths: list[tuple[str, int]]) -> CompletionOutput:
        assert self.ending is not None, "the output is complete when the sequence has ended"
        return CompletionOutput(
            index=self.index,
            text="".join(self._shown),
            token_ids=self.token_ids,
            finish_reason=self.ending.reason,
            stop_reason=self.ending.stop_reason,
            logprobs=self.logprobs,
            paths=paths,
            message=self.ending.message,
            hidden_states=self.states,
            routed_experts=self.routing,
        )


def _text_of(request: Request, tokenizer: Tokenizer | None) -> OutputText | None:
    """Detokeniser and stop strings of one continuation, where it makes text."""
    if tokenizer is None or request.pooling is not None:
        return None
    params = request.params
    return OutputText(
        tokenizer,
        request.prompt_token_ids,
        stops=tuple(params.stop),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )
