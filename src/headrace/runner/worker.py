"""One rank's step: forward, sample, advance, and send the results to the host."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from torch import Tensor

from headrace.base.decision import Refusal
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import HiddenStates, ModelRunnerOutput, TokenLogprobs
from headrace.execution.selector import Choice
from headrace.execution.split_prefill import SplitForward
from headrace.execution.token_ring import InFlight, TokenRing
from headrace.runner.model_runner import ModelRunner

Part = TypeVar("Part", TokenLogprobs, HiddenStates)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResults:
    """A step's results on the host.

    Attributes:
        tokens: sampled token of each sampling row; finite: whether its logits were numbers.
        logprobs, prompt_logprobs, hidden: host tensors, `None` when no row asked.
        evidence: what observers left, by name.
    """

    tokens: list[int]
    finite: list[bool]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    hidden: HiddenStates | None
    evidence: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A launched step. `collect` waits for its results; call it after the next launch."""

    path: str
    bucket: Bucket
    refused: tuple[Refusal, ...]
    in_flight: InFlight
    evidence: tuple[str, ...] = ()

    @property
    def was_immediate(self) -> bool:
        """The results were there when the launch returned."""
        return self.in_flight.event is None

    def collect(self) -> HostResults:
        host = self.in_flight.wait()
        return HostResults(
            tokens=host["tokens"].tolist() if "tokens" in host else [],
            finite=host["finite"].tolist() if "finite" in host else [],
            logprobs=_unpack("logprobs", TokenLogprobs, host),
            prompt_logprobs=_unpack("prompt_logprobs", TokenLogprobs, host),
            hidden=_unpack("hidden", HiddenStates, host),
            evidence={name: host[name] for name in self.evidence},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """A step between two layers, and why it takes this path."""

    forward: SplitForward
    choice: Choice


class TpModelWorker:
    """Runs steps on the model runner of one rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._ring = TokenRing(runner.device)

    def forward_batch_generation(self, batch: ForwardBatch) -> StepResult:
        """Launch one step; nothing here waits for the device."""
        return self._finish(self.runner.forward(batch), batch)

    def begin_split(self, batch: ForwardBatch) -> SplitStep:
        """Begin a prompt step that runs some layers at a time."""
        forward, choice = self.runner.begin_split_prefill(batch)
        return SplitStep(forward=forward, choice=choice)

    def advance_split(self, step: SplitStep, layers: int) -> StepResult | None:
        """Launch the next layers of such a step; its result once all are launched. Other steps may
        have run since."""
        output = self.runner.forward_split_prefill(
            step.forward, step.choice, layers, reinit_attention_backend=True
        )
        return None if output is None else self._finish(output, step.forward.batch)

    def _finish(self, output: ModelRunnerOutput, batch: ForwardBatch) -> StepResult:
        """Sample, and send what the step brings on its way to the host."""
        logits = output.logits_output
        tensors = _pack("prompt_logprobs", logits.prompt_logprobs) | dict(output.evidence)
        with self.runner.spans("sample"):
            sampled = self.runner.sample(logits, batch)
        if sampled is not None:
            tensors["tokens"], tensors["finite"] = sampled.next_token_ids, sampled.finite
            tensors |= _pack("logprobs", sampled.logprobs)
        return StepResult(
            path=output.path,
            bucket=output.bucket,
            refused=output.refused,
            in_flight=self._ring.send(tensors, own=_pack("hidden", logits.hidden)),
            evidence=tuple(output.evidence),
        )


def _pack(prefix: str, part: TokenLogprobs | HiddenStates | None) -> dict[str, Tensor]:
    """The tensors of a part under names of their own."""
    if part is None:
        return {}
    named = {entry.name: getattr(part, entry.name) for entry in fields(part)}
    return {f"{prefix}.{name}": tensor for name, tensor in named.items() if tensor is not None}


def _unpack(prefix: str, kind: type[Part], host: dict[str, Tensor]) -> Part | None:
    names = [entry.name for entry in fields(kind)]
    found = {name: host[f"{prefix}.{name}"] for name in names if f"{prefix}.{name}" in host}
    return kind(**found) if found else None
