"""How the tokens are spread over the experts: counted on the device, kept on the host.

Three modes, as SGLang's recorder has them. "stat" adds up; "per_pass" keeps the counts of every
forward; "per_token" keeps the experts of every token too. Counted are live tokens: a padded token
or one of a row that has ended is written to slot 0, and what is written there does not count.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import RequestError
from headrace.base.folders import made_folder
from headrace.base.shown import shown
from headrace.base.whole_file import whole_file
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.rows import Allocate
from headrace.observers.routing import RoutingBuffer
from headrace.observers.step_observer import Evidence, ForwardRun

NAME = "expert_distribution"
STAT, PER_PASS, PER_TOKEN = "stat", "per_pass", "per_token"
MODES = (STAT, PER_PASS, PER_TOKEN)

_PASS, _COUNTS, _TOKENS, _IDS = (f"{NAME}.{part}" for part in ("pass", "counts", "tokens", "ids"))


class ExpertCounter:
    """Counts the live tokens of every expert, behind the body of each forward. A `ForwardTap`.

    Args:
        layers: that have experts. experts: of each.

    Attributes:
        counts: [L, E] int64, of the last forward. total: the same, of all while `counting` is 1.
        tokens: [3, N] int64, of the last forward: id, position, and 1 where it is live.
    """

    name = NAME

    def __init__(
        self, buffer: RoutingBuffer, layers: int, experts: int, allocate: Allocate
    ) -> None:
        self._buffer = buffer
        device = buffer.ids.device
        self.counts = allocate("routing", (layers, experts), torch.int64)
        self.total = allocate("routing", (layers, experts), torch.int64)
        self.counting = allocate("routing", (1,), torch.int64)
        self.tokens = allocate("routing", (3, buffer.ids.shape[0]), torch.int64)
        self._first = torch.arange(layers, device=device)[:, None] * experts  # [L, 1]

    def before(self, batch: ForwardBatch) -> None:
        """Nothing is routed yet."""

    def after(self, batch: ForwardBatch) -> None:
        """Graphs record it: no shape follows the routing, nothing is read back."""
        slots = next(iter(batch.kv.values())).out_cache_loc
        count = slots.shape[0]
        live = (slots != 0).long()
        ids = self._buffer.ids[:count]  # [T, L, k]
        places = (ids + self._first).flatten()
        ones = live[:, None, None].expand(ids.shape).flatten()
        self.counts.zero_().view(-1).scatter_add_(0, places, ones)
        self.total.add_(self.counts * self.counting)
        self.tokens[:, :count] = torch.stack((batch.input_ids, batch.positions, live))


class ExpertDistribution:
    """The recorder: starts, stops and writes what was counted. A `StepObserver`.

    Args:
        mode: of a recording that names none.
        layers: numbers of the model's layers that have experts.
    """

    name = NAME

    def __init__(
        self, counter: ExpertCounter, buffer: RoutingBuffer, mode: str, layers: tuple[int, ...]
    ) -> None:
        self._counter, self._buffer = counter, buffer
        self._default, self._layers = mode, layers
        self._passes = 0  # forwards so far
        self._first = 0  # that belongs to this recording
        self._mode = ""
        self._is_recording = False
        self._records: list[dict[str, Any]] = []

    # ---- around forwards

    @contextmanager
    def around(self, run: ForwardRun, evidence: Evidence) -> Iterator[None]:
        yield
        self._passes += 1
        if not self._is_recording or self._mode == STAT:
            return
        counter, count = self._counter, run.batch.num_tokens
        number = [self._passes, run.batch.mode.value]
        evidence.tensors[_PASS] = torch.tensor(number)  # of the host, as it stays
        evidence.tensors[_COUNTS] = counter.counts.clone()
        if self._mode == PER_TOKEN:
            evidence.tensors[_TOKENS] = counter.tokens[:, :count].clone()
            evidence.tensors[_IDS] = self._buffer.ids[:count].clone()

    def take(self, host: Mapping[str, Tensor]) -> None:
        if _PASS not in host:
            return
        number, mode = host[_PASS].tolist()
        if number <= self._first:
            return  # of a recording that was dumped or dropped meanwhile
        record: dict[str, Any] = {
            "forward_pass_id": number,
            "rank": 0,
            "mode": ForwardMode(mode).name.lower(),
            "logical_count": host[_COUNTS].clone(),
        }
        if _TOKENS in host:
            ids, positions, live = host[_TOKENS]
            kept = live.bool()
            record["input_ids"], record["positions"] = ids[kept], positions[kept]
            record["topk_ids_of_layer"] = host[_IDS][kept].transpose(0, 1).contiguous()
        self._records.append(record)

    # ---- by name

    def start(self, mode: str | None = None) -> dict[str, Any]:
        """Record from the next forward on; what was recorded and not dumped is forgotten.

        Args:
            mode: "stat", "per_pass" or "per_token"; `None`: the one of the start.

        Raises:
            RequestError: another mode.
        """
        mode = self._default if mode is None else mode
        if not isinstance(mode, str) or mode not in MODES:
            raise RequestError(f"mode is {shown(mode)}", remedy=f"Allowed: {', '.join(MODES)}")
        self._forget()
        self._mode, self._is_recording = mode, True
        self._counter.counting.fill_(1)
        return {"mode": mode}

    def stop(self) -> dict[str, Any]:
        """Record no more; what was recorded waits to be dumped.

        Raises:
            RequestError: nothing is recorded.
        """
        if not self._is_recording:
            raise RequestError("No expert distribution is recorded", remedy="Start it first")
        self._is_recording = False
        self._counter.counting.zero_()
        return {"mode": self._mode}

    def dump(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Write what was recorded, and begin anew; see docs/experts.md for the file.

        Args:
            folder: made when missing.

        Raises:
            RequestError: nothing was recorded, or it cannot be written.
        """
        if not self._mode:
            raise RequestError("No expert distribution was recorded", remedy="Start it first")
        content = self._content()
        name = f"expert_distribution_recorder_{time.time_ns()}.pt"
        path = made_folder(folder, "The expert distribution") / name
        try:
            with whole_file(path) as place, place.open("wb") as file:
                torch.save(content, file)
        except (OSError, RuntimeError) as error:
            cause = error.__context__ or error  # torch's own words hide that a disk is full
            raise RequestError(
                f"The expert distribution cannot be written to {shown(folder)}", why=str(cause)
            ) from error
        mode = self._mode
        self._forget()
        if self._is_recording:
            self._mode = mode
        return {"path": str(path), "mode": mode}

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"rank": 0, "mode": self._mode, "layers": list(self._layers)}
        if self._mode == STAT:
            total = self._counter.total.cpu()
            content |= {"logical_count": total, "balancedness": balancedness(total)}
        else:
            content["records"] = self._records
        return content

    def _forget(self) -> None:
        self._records, self._first, self._mode = [], self._passes, ""
        self._counter.total.zero_()


def balancedness(counts: Tensor) -> float:
    """Mean load over the largest load of an expert, averaged over layers: 1 when all are alike.

    Args:
        counts: [L, E]. Layers without a token say nothing; without any the result is 1.
    """
    busy = counts[counts.sum(1) > 0].double()
    if not len(busy):
        return 1.0
    return float((busy.mean(1) / busy.max(1).values).mean())
