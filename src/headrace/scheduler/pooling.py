"""Hidden states that a step must bring, and what becomes of those that are for embeddings.

The state of a last token comes with the step that ends the prompt; for a mean every step brings
the sum over its chunk, which the host adds up.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.batch.facts import HiddenMode
from headrace.batch.outputs import HiddenStates
from headrace.batch.side_request import HiddenStateRequest
from headrace.request.outcome import Finished
from headrace.request.pooling_params import PoolingParams
from headrace.scheduler.chooser import Share
from headrace.scheduler.row_spans import (
    RowSpan,
    inner_layers,
    take_states_of_rows,
    wanted_rows,
)
from headrace.scheduler.sequence import FloatArray, Sequence, State
from headrace.scheduler.token_rows import StateRows

NOT_FINITE = (
    "The model gave no finite hidden states for this prompt: its weights overflow in this dtype. "
    "Try dtype bfloat16 or float32."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """What a step brings to one embedding. `ends`: the prompt is done with it."""

    sequence: Sequence
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParts:
    """Whose states a step brings, in the order of its `HiddenStates`.

    Attributes:
        tokens, sums: for embeddings; `rows` come behind `tokens`.
        layers: inner layers that rows ask for.
    """

    tokens: tuple[StatePart, ...] = ()
    sums: tuple[StatePart, ...] = ()
    rows: tuple[RowSpan[StateRows], ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def mode(self) -> HiddenMode:
        if self.sums or any(span.count > 1 for span in self.rows):
            return HiddenMode.ALL
        return HiddenMode.LAST if self.tokens or self.rows else HiddenMode.NONE


NO_STATES = StateParts()


def wanted_states(
    shares: Seq[Share], send: Callable[[list[int]], Tensor]
) -> tuple[StateParts, HiddenStateRequest | None]:
    """Whose states the step of these shares brings, and the request for them, `None` without any.

    Args:
        send: brings numbers to the device as int64.
    """
    tokens: list[StatePart] = []
    sums: list[StatePart] = []
    places: list[int] = []
    runs: list[tuple[int, int]] = []
    first = 0
    for share in shares:
        sequence, end = share.sequence, first + share.new_tokens
        pooling = sequence.request.pooling
        if pooling is not None:
            part = StatePart(sequence=sequence, ends=share.new_tokens == sequence.prefill_left)
            if pooling.pooling == "mean":
                sums.append(part)
                runs.append((first, end))
            elif part.ends:
                tokens.append(part)
                places.append(end - 1)
        first = end
    spans, row_places = wanted_rows(shares, lambda sequence: sequence.state_rows)
    places += row_places
    if not places and not sums:
        return NO_STATES, None
    parts = StateParts(
        tokens=tuple(tokens), sums=tuple(sums), rows=tuple(spans), layers=inner_layers(spans)
    )
    index = send(places) if places else None
    return parts, HiddenStateRequest(token_index=index, layers=parts.layers, sums=tuple(runs))


def take_states(
    parts: StateParts, states: HiddenStates | None, finite: Mapping[Sequence, bool]
) -> Iterator[tuple[Sequence, Finished]]:
    """Add what a step has brought; the sequences that end by it. They have their embeddings.

    Args:
        finite: of the step's sequences, whether their logits are numbers.
    """
    if states is None:
        return
    pooled = None
    if states.tokens is not None:
        count = len(parts.tokens)
        take_states_of_rows(parts.rows, states.tokens[count:], parts.layers, finite)
        pooled = states.tokens[:count, -1]
    for listed, tensor in ((parts.tokens, pooled), (parts.sums, states.sums)):
        if not listed or tensor is None:
            continue
        for part, line in zip(listed, tensor.double().numpy(), strict=True):
            ending = _take(part, line)
            if ending is not None:
                yield part.sequence, ending


def embedding_of(state: FloatArray, params: PoolingParams) -> NDArray[np.float32]:
    """[H] float64 -> [dimensions] float32, cut first and normalised then."""
    cut = state[: params.dimensions]
    if params.normalize:
        # sentence-transformers' bound; only a state of zeros is shorter
        cut = cut / max(float(np.linalg.norm(cut)), 1e-12)
    return cut.astype(np.float32)


def _take(part: StatePart, line: FloatArray) -> Finished | None:
    sequence = part.sequence
    if sequence.state is State.FINISHED:
        return None  # it ended while the step was in flight
    pooling = sequence.request.pooling
    assert pooling is not None, "only such sequences have parts"
    if not np.isfinite(line).all():
        return Finished("error", message=NOT_FINITE)
    if pooling.pooling == "mean":
        known = sequence.state_sum
        sequence.state_sum = line = line if known is None else known + line
    if not part.ends:
        return None
    mean = line / sequence.prompt_length if pooling.pooling == "mean" else line
    sequence.proven_finite = True
    sequence.sink.embedding(embedding_of(mean, pooling))
    return Finished("stop")
