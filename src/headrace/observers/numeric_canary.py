"""The numeric canary: every n-th step is run twice, by reference and by its path, and compared.

What a layer writes to the KV pool is a function of the layer's input, and it lies there after every
path, graphs included. So the first layer whose keys or values differ says where a path went wrong,
and the logits say how far that came. All is compared on the device; some numbers a layer travel
with the results of the step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import CanaryError
from headrace.base.log import get_logger
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.outputs import LogitsProcessorOutput
from headrace.observers.closeness import worst_logits, worst_token
from headrace.observers.divergence import Divergence
from headrace.observers.step_contents import KeyValue, StepContents
from headrace.observers.step_observer import Evidence, ForwardRun
from headrace.observers.tolerances import Tolerance

log = get_logger(__name__)

NAME = "numeric_canary"
REPORT = f"{NAME}.report"
IN_PARTS = ("split_prefill",)
NUMBERS = 4  # of a report: for the logits, and for each layer (error and place of K, and of V)

Reference = Callable[[ForwardBatch], StepContents]
ReadAgain = Callable[[ForwardBatch], Sequence[KeyValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """What the host knows of a step under comparison."""

    number: int
    path: str
    bucket: Bucket
    backend: str
    names: list[str]
    bounds: HostBounds

    def token(self, place: int) -> tuple[str, int]:
        """Sequence and position of the token at a place of the step."""
        for index, new in enumerate(self.bounds.extend_lens):
            if place < new:
                return self.names[index], self.bounds.prefix_lens[index] + place
            place -= new
        raise AssertionError("a place beyond the tokens of the step")


@dataclass(slots=True, kw_only=True)
class NumericCanary:
    """Compares every n-th live step with its reference.

    Args:
        every: n, from 1. raises: fail the step that diverges; else it is logged.
        reference: runs a batch by reference before its path does, and leaves no trace.
        read: keys and values at the slots of a filled batch.
        tolerance: of the model's dtype.
        backends: name of the attention backend of prefill and of decode steps.
        most_tokens: larger steps are left out; the next that is not takes its turn.
    """

    every: int
    raises: bool
    reference: Reference
    read: ReadAgain
    tolerance: Tolerance
    backends: tuple[str, str]
    most_tokens: int
    name: str = NAME
    divergences: deque[Divergence] = field(default_factory=lambda: deque(maxlen=64))
    _seen: int = 0
    _due: bool = False
    _compared: int = 0
    _diverged: int = 0
    _left_out: int = 0
    _under_way: deque[_Context] = field(default_factory=deque)

    def stats(self) -> dict[str, Any]:
        return {"compared": self._compared, "diverged": self._diverged, "left_out": self._left_out}

    @contextmanager
    def around(self, run: ForwardRun, evidence: Evidence) -> Iterator[None]:
        if not self._takes(run):
            yield
            return
        expected = self.reference(run.batch)
        yield
        self._compared += 1
        number = self._compared
        batch = run.batch
        evidence.tensors[REPORT] = self._report(number, expected, evidence)
        self._under_way.append(
            _Context(
                number=number,
                path=run.path,
                bucket=run.bucket,
                backend=self.backends[batch.mode is ForwardMode.DECODE],
                names=batch.names() or [f"row {row}" for row in batch.bounds.rows],
                bounds=batch.bounds,
            )
        )

    def _takes(self, run: ForwardRun) -> bool:
        """Whether it is this step's turn. Steps in parts are none: others run between the parts."""
        batch = run.batch
        if not batch.facts.live_tokens or batch.mode is ForwardMode.IDLE or run.path in IN_PARTS:
            return False
        self._seen += 1
        self._due = self._due or self._seen % self.every == 0
        if self._due and batch.num_tokens > self.most_tokens:
            self._left_out += 1
            if self._left_out == 1:
                log.info(
                    "%s: steps of more than %d tokens are left out, this one has %d",
                    self.name,
                    self.most_tokens,
                    batch.num_tokens,
                )
            return False
        due, self._due = self._due, False
        return due

    def _report(self, number: int, expected: StepContents, evidence: Evidence) -> Tensor:
        """[1 + 4 + 4 L] float64 on the device: the number, what `worst_logits` says (NaN where no
        row samples), and `worst_token` of each layer's K and V."""
        by_layer = [
            worst_token(written, ours, slots != 0)
            for slots, reference, real in zip(
                expected.slots, expected.keys_values, self.read(expected.batch), strict=True
            )
            for written, ours in zip(real, reference, strict=True)
        ]
        head = torch.full((1,), number, dtype=torch.float64, device=by_layer[0].device)
        output, logits, index = evidence.output, expected.logits, expected.token_index
        if logits is None or index is None or not isinstance(output, LogitsProcessorOutput):
            return torch.cat((head, head.new_full((NUMBERS,), torch.nan), *by_layer))
        live = expected.slots[0].index_select(0, index) != 0
        found = worst_logits(output.next_token_logits, logits, live)
        found[1:2] = index.index_select(0, found[1:2].long())  # of the tokens, not of the rows
        return torch.cat((head, found, *by_layer))

    def take(self, host: Mapping[str, Tensor]) -> None:
        """Raises `CanaryError` for a step that diverged, if asked to."""
        if REPORT not in host:
            return
        number, *numbers = host[REPORT].tolist()
        while self._under_way[0].number < number:  # a step that failed never brings its report
            self._under_way.popleft()
        found = self._judge(self._under_way.popleft(), numbers)
        if found is None:
            return
        self._diverged += 1
        self.divergences.append(found)
        error = CanaryError(found.what, why=found.why, remedy=found.remedy)
        if self.raises:
            raise error
        log.error("%s: %s", self.name, error)

    def _judge(self, context: _Context, numbers: Sequence[float]) -> Divergence | None:
        """The first difference of a report."""
        logits, layers = numbers[:NUMBERS], numbers[NUMBERS:]
        by_layer = [layers[at : at + NUMBERS] for at in range(0, len(layers), NUMBERS)]
        allowed = self.tolerance
        layer: int | None = None
        parts: tuple[str, ...] = ()
        error, place = logits[:2]
        for index, (key, key_place, value, value_place) in enumerate(by_layer):
            tolerance = allowed.layer(index)
            wrong = [name for name, each in (("K", key), ("V", value)) if each > tolerance]
            if wrong:
                layer, parts = index, tuple(wrong)
                error, place = max((key, key_place), (value, value_place))
                break
        else:
            tolerance = allowed.logits
            if isnan(error) or (error <= tolerance and logits[2] <= allowed.single_logit):
                return None
        sequence, position = context.token(int(place))
        return Divergence(
            path=context.path,
            bucket=context.bucket,
            backend=context.backend,
            layer=layer,
            parts=parts,
            error=error,
            tolerance=tolerance,
            errors=tuple(max(key, value) for key, _, value, _ in by_layer),
            logit_difference=None if isnan(logits[3]) else logits[3],
            sequence=sequence,
            position=position,
            sequences=tuple(context.names),
        )
