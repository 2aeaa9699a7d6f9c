"""A request before it is queued, and in flight."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.outputs import EmbeddingOutput, Piece, RequestOutput
from headrace.engine.sequence_output import SequenceOutput
from headrace.request.pooling_params import PoolingParams
from headrace.request.request import Request
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.bad_words import BadWords
from headrace.sampling.grammar.compiler import Compilation
from headrace.sampling.grammar.mask import GrammarMask
from headrace.sampling.host_mask import HostMask, together
from headrace.scheduler.sequence import Sequence as ScheduledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that was found valid; `submit` cannot refuse it.

    Attributes:
        text: the prompt as text, where it came so.
        stop_ids: ids that end it, the model's own included.
        grammar: of its form, perhaps still being compiled; the sequences wait for it, and one that
            turns out to be none ends them with "error".
        pooling: it is to be embedded and makes no token.
    """

    text: str | None
    token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: BadWords | None = None
    grammar: Compilation | None = None
    pooling: PoolingParams | None = None

    def wait(self) -> None:
        """Wait for the grammar, if there is one; raises `RequestError` when it is refused."""
        if self.grammar is not None:
            self.grammar.wait()

    def host_mask(self) -> HostMask | None:
        """The mask of one of its sequences."""
        grammar = None
        if self.grammar is not None:
            grammar = GrammarMask(self.grammar, self.stop_ids, self.params.min_tokens)
        return together(grammar, self.bad_words)


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

    @property
    def output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._outputs)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache; 0 until the request has run."""
        return self._sequences[0].cached_tokens

    def paths(self, index: int) -> list[tuple[str, int]]:
        """Forward paths that the steps of a continuation took so far, run-length."""
        return self._sequences[index].paths

    def queue_seconds(self, index: int) -> float | None:
        """Time from the queue to its first step of a continuation; `None` until it has run."""
        return self._sequences[index].queue_seconds

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
            cached_tokens=self.cached_tokens,
        )

    def embedding_output(self) -> EmbeddingOutput:
        """The result of a finished request for an embedding."""
        output, sequence = self._outputs[0], self._sequences[0]
        assert output.ending is not None, "the output is complete when the sequence has ended"
        return EmbeddingOutput(
            request_id=self.request_id,
            embedding=output.vector,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            cached_tokens=self.cached_tokens,
            paths=sequence.paths,
            finish_reason=output.ending.reason,
            message=output.ending.message,
        )
