"""The dumper: tensors of chosen steps and layers, written to a folder as they reach the host.

Keys, values and logits of a step are there on every path: they are read from the pool and from what
the path returns. The residual stream between layers is seen only where the model itself runs, so
whoever asks for it asks for eager steps.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from headrace.base.log import get_logger
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.forward_mode import ForwardMode
from headrace.observers.dump_files import LOGITS, STREAM, K, StepFacts, V, write_step
from headrace.observers.step_contents import KeyValue
from headrace.observers.step_observer import Evidence, ForwardRun

log = get_logger(__name__)

NAME = "dump"
NUMBER = f"{NAME}.number"


class Reader(Protocol):
    """Reads what a step is made of, whatever path runs it."""

    def filled(self, batch: ForwardBatch) -> ForwardBatch: ...
    def slots(self, batch: ForwardBatch) -> list[Tensor]: ...
    def keys_values(
        self, batch: ForwardBatch, layers: Sequence[int] | None = None
    ) -> list[KeyValue]: ...


Tap = Callable[[int, Tensor], None]
Tapped = Callable[[Tap, Container[int]], AbstractContextManager[None]]


@dataclass(slots=True, kw_only=True)
class Dumper:
    """Dumps the steps to come.

    Args:
        folder: where the files go. layers: which. names: of `dump_files.NAMES`.
        most: steps; `None`: all.
        model, dtype, backends: for the metadata; backends of prefill and decode.
        reader: inputs, keys and values of a step. tapped: a context in which a tap sees the stream
            behind so many layers.
    """

    folder: Path
    layers: Sequence[int]
    names: frozenset[str]
    most: int | None
    model: str
    dtype: str
    backends: tuple[str, str]
    reader: Reader
    tapped: Tapped
    name: str = NAME
    files: list[Path] = field(default_factory=list)
    failure: Exception | None = None
    _begun: int = 0
    _under_way: dict[int, StepFacts] = field(default_factory=dict)

    def stats(self) -> dict[str, Any]:
        return {"steps": len(self.files)}

    @contextmanager
    def around(self, run: ForwardRun, evidence: Evidence) -> Iterator[None]:
        if not self._takes(run.batch):
            yield
            return
        batch, streams = self.reader.filled(run.batch), dict[str, Tensor]()
        behind = {layer + 1: layer for layer in self.layers}

        def keep(count: int, stream: Tensor) -> None:
            streams[f"{STREAM}.{behind[count]}"] = stream.clone()  # the next layer may write it

        with self.tapped(keep, behind) if STREAM in self.names else nullcontext():
            yield
        if evidence.output is None:
            return  # a part of a step; the last part brings all
        self._begun += 1
        tensors = {**self._inputs(batch), **self._keys_values(batch), **streams}
        tensors |= self._logits(batch, evidence)
        tensors["number"] = torch.full_like(batch.positions[:1], self._begun)
        evidence.tensors |= {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}
        self._under_way[self._begun] = self._facts(run)

    def _takes(self, batch: ForwardBatch) -> bool:
        left = self.most is None or self._begun < self.most
        return batch.facts.live_tokens > 0 and left and self.failure is None

    def _inputs(self, batch: ForwardBatch) -> dict[str, Tensor]:
        new = torch.tensor(batch.bounds.extend_lens)
        sequence = torch.repeat_interleave(torch.arange(len(new)), new)
        return {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "sequence": sequence.to(batch.positions.device),
            "live": self.reader.slots(batch)[0] != 0,
        }

    def _keys_values(self, batch: ForwardBatch) -> dict[str, Tensor]:
        wanted = [name for name in (K, V) if name in self.names]
        if not wanted:
            return {}
        return {
            f"{name}.{layer}": part
            for layer, both in zip(
                self.layers, self.reader.keys_values(batch, self.layers), strict=True
            )
            for name, part in zip((K, V), both, strict=True)
            if name in wanted
        }

    def _logits(self, batch: ForwardBatch, evidence: Evidence) -> dict[str, Tensor]:
        output, sampling = evidence.output, batch.sampling
        if LOGITS in self.names and sampling is not None and output is not None:
            logits = output.next_token_logits.clone()  # sampling may change them
            return {LOGITS: logits, "logit_token": sampling.token_index}
        return {}

    def _facts(self, run: ForwardRun) -> StepFacts:
        batch, bucket = run.batch, run.bucket
        return StepFacts(
            step=self._begun,
            model=self.model,
            dtype=self.dtype,
            path=run.path,
            bucket=(bucket.tokens, bucket.sequences, bucket.variant),
            backend=self.backends[batch.mode is ForwardMode.DECODE],
            mode=batch.mode.name,
            sequences=tuple(batch.sequence_names()),
            rows=tuple(batch.bounds.rows),
        )

    def take(self, host: Mapping[str, Tensor]) -> None:
        """Write a step. What goes wrong ends the dump, and no request."""
        if NUMBER not in host:
            return
        prefix = f"{NAME}."
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in host.items()
            if name.startswith(prefix) and name != NUMBER
        }
        facts = self._under_way.pop(int(host[NUMBER]))
        if self.failure is not None:
            return
        try:
            self.files.append(write_step(self.folder, facts, tensors))
        except (OSError, SafetensorError) as error:
            log.error("The dump ends: %s", error)
            self.failure = error
