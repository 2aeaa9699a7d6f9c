"""The numeric canary: every n-th step is run by reference and by its path, and compared.

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
from headrace.observers.closeness import logit_errors, token_errors, worst, worst_times
from headrace.observers.divergence import Divergence
from headrace.observers.step_contents import KeyValue, StepContents
from headrace.observers.step_observer import Evidence, ForwardRun
from headrace.observers.tolerances import TIMES, Tolerance

log = get_logger(__name__)

NAME = "numeric_canary"
REPORT = f"{NAME}.report"
IN_PARTS = ("split_prefill",)
OF_LOGITS, OF_PART = 5, 3  # numbers of a report
SINGLE = 5  # the largest of many differences is some five times their root mean square

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
                names=batch.sequence_names(),
                bounds=batch.bounds,
            )
        )

    def _takes(self, run: ForwardRun) -> bool:
        """Whether it is this step's turn. Steps in parts are none: others run between the parts."""
        batch = run.batch
        if not batch.facts.live_tokens or run.path in IN_PARTS:
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
        """[1 + 5 + 6 L] float64 on the device: the number; of the logits what `_logits` says, NaN
        where no row samples; of each layer's K and V what `worst_times` says."""
        tolerance, by_layer = self.tolerance, []
        for slots, real, reference, shaken in zip(
            expected.slots,
            self.read(expected.batch),
            expected.keys_values,
            expected.shaken,
            strict=True,
        ):
            live = slots != 0
            for written, ours, moved in zip(real, reference, shaken, strict=True):
                allowed = tolerance.floor + TIMES * token_errors(moved, ours, live)
                by_layer.append(worst_times(token_errors(written, ours, live), allowed))
        head = torch.full((1,), number, dtype=torch.float64, device=by_layer[0].device)
        return torch.cat((head, self._logits(expected, evidence, head), *by_layer))

    def _logits(self, expected: StepContents, evidence: Evidence, like: Tensor) -> Tensor:
        """[5]: of the root mean squares what `worst_times` says, by how many times a single logit
        exceeds its bound, and the largest difference of one."""
        output, index = evidence.output, expected.token_index
        logits, shaken = expected.logits, expected.shaken_logits
        if index is None or logits is None or output is None:
            return like.new_full((OF_LOGITS,), torch.nan)
        assert shaken is not None
        live = expected.slots[0].index_select(0, index) != 0
        mean, single, number = logit_errors(output.next_token_logits, logits, live)
        moved_mean, moved_single, _ = logit_errors(shaken, logits, live)
        floor = self.tolerance.logit_floor
        found = worst_times(mean, floor + TIMES * moved_mean)
        found[1:2] = index.index_select(0, found[1:2].long())  # of the tokens, not of the rows
        alone = worst_times(single, SINGLE * floor + TIMES * moved_single)[:1]
        return torch.cat((found, alone, worst(number)[0].view(1)))

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
        (times, place, error, single, difference), layers = numbers[:OF_LOGITS], numbers[OF_LOGITS:]
        parts = [layers[at : at + OF_PART] for at in range(0, len(layers), OF_PART)]
        by_layer = list(zip(parts[::2], parts[1::2], strict=True))
        layer: int | None = None
        wrong: tuple[str, ...] = ()
        for index, both in enumerate(by_layer):
            wrong = tuple(name for name, part in zip("KV", both, strict=True) if part[0] > 1)
            if wrong:
                layer, (times, place, error) = index, max(both, key=lambda part: part[0])
                break
        else:
            times = max(times, single)
            if isnan(times) or times <= 1:
                return None
        sequence, position = context.token(int(place))
        return Divergence(
            path=context.path,
            bucket=context.bucket,
            backend=context.backend,
            layer=layer,
            parts=wrong,
            error=error,
            times=times,
            errors=tuple(max(key[2], value[2]) for key, value in by_layer),
            logit_difference=None if isnan(difference) else difference,
            sequence=sequence,
            position=position,
            sequences=tuple(context.names),
        )
