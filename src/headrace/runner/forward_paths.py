"""The forward paths of a runner: which there are by the plan, and what their graphs take."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headrace.attention.backend import AttentionBackend
from headrace.base.decision import Decision, Refusal
from headrace.batch.rows import Rows
from headrace.config.plan import OFF, Plan
from headrace.execution.compiled_pieces import CompiledForward
from headrace.execution.cpu_graph import CpuGraphPath, bucket_sizes
from headrace.execution.eager import EagerPath
from headrace.execution.eager_ends import EagerEnds
from headrace.execution.graph_recorder import GraphRecorder
from headrace.execution.kept_states import KeptStates
from headrace.execution.path import ForwardPath
from headrace.execution.prefill_graph import (
    BREAKABLE_SIZES,
    PIECEWISE_SIZES,
    SECOND_ASK,
    PrefillGraphPath,
    prefill_sizes,
)
from headrace.execution.preparation import BatchPreparation
from headrace.execution.split_prefill import SplitPrefill
from headrace.kernels.support_triton import has_dependent_launch
from headrace.layers.logits import process_logits
from headrace.models.decoder import CausalDecoder
from headrace.observers.tap import NO_TAPS, Taps
from headrace.runner.choices.prefill_graph import PIECEWISE
from headrace.runner.inner_states import with_asked_states, with_kept_states

if TYPE_CHECKING:
    from headrace.execution.decode_graph import DecodeGraphPath

GRAPH_BYTES = 8 * 2**20
"""What the driver keeps for an instantiated graph of some hundred kernels, or for as many kernels
in several graphs, and for kernels loaded meanwhile: an upper estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPaths:
    """Every path of a runner; `None` where the plan has it off."""

    decode_graph: "DecodeGraphPath | None"
    prefill_graph: PrefillGraphPath | None
    cpu_graph: CpuGraphPath | None
    split_prefill: SplitPrefill | None
    eager: EagerPath

    @property
    def table(self) -> list[ForwardPath]:
        """Best first."""
        graphs = (self.decode_graph, self.prefill_graph, self.cpu_graph)
        paths = (*graphs, self.split_prefill, self.eager)
        return [path for path in paths if path is not None]

    def capture_all(self, *, progress: bool = False) -> None:
        """Capture every graph now."""
        for path in (self.prefill_graph, self.decode_graph):
            if path is not None:
                path.capture_all(progress=progress)

    def trial(self) -> dict[str, Decision[int]]:
        """Capture the largest bucket of each graph path: bytes that its graphs will take, by title.

        Smaller buckets fit into the memory of the largest, up to what the driver keeps for each.
        """
        reserves: dict[str, Decision[int]] = {}
        for path, unit in ((self.decode_graph, "rows"), (self.prefill_graph, "tokens")):
            if path is not None:
                largest, count = path.capture_largest(), len(path.sizes)
                reserves[path.title] = Decision(
                    name=f"{path.name}_bytes",
                    value=largest + count * GRAPH_BYTES,
                    reason=f"measured: {largest:,} for {path.sizes[-1]} {unit}; {GRAPH_BYTES:,} "
                    f"for each of {count} graphs",
                )
        return reserves


def has_graphs(plan: Plan) -> bool:
    """Whether the plan has graphs on a GPU, whose memory must be reserved."""
    return (plan.decode_graph.value, plan.prefill_graph.value) != (OFF, OFF)


class PathBuilder:
    """Makes the paths of a plan for a model whose layers are bound.

    Args:
        rows: the columns. tables: page table [R, max pages] int32 of each KV group.
        backends: of each KV group.
        taps: device work around every forward.
    """

    def __init__(
        self,
        plan: Plan,
        model: CausalDecoder,
        *,
        rows: Rows,
        tables: Mapping[str, torch.Tensor],
        backends: Mapping[str, AttentionBackend],
        taps: Taps = NO_TAPS,
    ) -> None:
        self._plan, self._model = plan, model
        self._rows, self._tables = rows, tables
        self._dtype: torch.dtype = getattr(torch, plan.dtype.value)
        self._page_size = plan.page_size.value
        self._ends = EagerEnds(
            preparation=BatchPreparation(rows, tables, self._page_size),
            backends=tuple(backends.values()),
            logits=partial(process_logits, model),
            taps=taps,
        )
        self._layers = model.attention_layers()
        self._groups = dict.fromkeys(tables, self._page_size)

    def build(self) -> ForwardPaths:
        """Raises `UnsupportedError` where the compiler of the CPU graph fails."""
        return ForwardPaths(
            decode_graph=self._decode_graph(),
            prefill_graph=self._prefill_graph(),
            cpu_graph=self._cpu_graph(),
            split_prefill=self._split_prefill(),
            eager=EagerPath(with_asked_states(self._model), self._ends),
        )

    def _decode_graph(self) -> "DecodeGraphPath | None":
        sizes = self._plan.decode_graph.value
        if isinstance(sizes, str):
            return None
        from headrace.execution.decode_graph import DecodeGraphPath  # its kernels need Triton

        kept, forward = self._kept_states(sizes[-1]), self._model.forward
        return DecodeGraphPath(
            sizes=sizes,
            rows=self._rows,
            tables=self._tables,
            page_size=self._page_size,
            backends=self._ends.backends,
            model=forward if kept is None else with_kept_states(self._model, kept),
            head=self._model.compute_logits,
            pdl=has_dependent_launch(self._rows.device),
            taps=self._ends.taps,
            kept=kept,
        )

    def _kept_states(self, rows: int) -> KeptStates | None:
        layers = self._plan.hidden_state_layers.value
        if not layers:
            return None
        hidden_size, device = self._model.traits.hidden_size, self._rows.device
        return KeptStates(layers, rows, hidden_size, dtype=self._dtype, device=device)

    def _prefill_graph(self) -> PrefillGraphPath | None:
        plan, model, device = self._plan, self._model, self._rows.device
        kind = plan.prefill_graph
        if kind.value == OFF:
            return None
        sizes, body = BREAKABLE_SIZES, lambda tokens: model.forward
        if kind.value == PIECEWISE:
            sizes, body = PIECEWISE_SIZES, self._compiled
        return PrefillGraphPath(
            sizes=prefill_sizes(sizes, plan.most_step_tokens),
            body=body,
            dtype=self._dtype,
            device=device,
            recorder=GraphRecorder(),
            ask=1 if kind.asked else SECOND_ASK,
            quick=kind.value != PIECEWISE,
            ends=self._ends,
            layers=self._layers,
            groups=self._groups,
        )

    def _compiled(self, tokens: int) -> CompiledForward:
        return CompiledForward(
            self._model,
            size=tokens,
            device=self._rows.device,
            remedy="Use prefill_graph breakable or off",
            layers=self._layers,
            groups=self._groups,
        )

    def _cpu_graph(self) -> CpuGraphPath | None:
        if self._plan.cpu_graph.value == OFF:
            return None
        sizes = bucket_sizes(self._plan.max_running_requests.value)
        path = CpuGraphPath(
            sizes=sizes,
            model=self._model,
            layers=self._layers,
            groups=self._groups,
            ends=self._ends,
        )
        path.prepare()
        return path

    def _split_prefill(self) -> SplitPrefill | None:
        layers = self._plan.split_prefill_layers.value
        if not layers:
            return None
        return SplitPrefill(layers=layers, model=self._model.model, ends=self._ends)


def absent_paths(plan: Plan) -> list[Refusal]:
    """Why paths do not exist, by their names."""
    decisions = (plan.decode_graph, plan.prefill_graph, plan.cpu_graph)
    return [refusal for decision in decisions for refusal in _why_off(decision)]


def _why_off(decision: Decision[Any]) -> list[Refusal]:
    if decision.value != OFF:
        return []
    if not decision.refused:
        return [Refusal(subject=decision.name, reason=decision.reason)]
    return [replace(refusal, subject=decision.name) for refusal in decision.refused]
