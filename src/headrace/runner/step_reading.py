"""A step seen from outside: its inputs gathered anew, its keys and values read from the pool, and
the whole of it once more in reference form.

Nothing of the path that runs the step is used: inputs come from the rows and tables by torch, so
that a path whose own gathering is wrong is found out.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.torch_native import TorchNativeBackend
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.rows import Rows
from headrace.batch.side_request import SideRequest
from headrace.config.persona import ModelTraits
from headrace.config.plan import Plan
from headrace.execution.preparation import BatchPreparation
from headrace.execution.replacing import replaced
from headrace.layers.attention import SelfAttention
from headrace.layers.operators import TORCH_OPERATORS
from headrace.models.decoder import CausalDecoder
from headrace.observers.step_contents import KeyValue, StepContents


class StepReader:
    """Reads what a step is made of.

    Args:
        rows: the columns. tables: page table [R, max pages] int32 of each KV group.
        layers: the attention layers in their order, bound to the pool.
    """

    def __init__(
        self,
        rows: Rows,
        tables: Mapping[str, Tensor],
        page_size: int,
        layers: Sequence[SelfAttention],
    ) -> None:
        self._preparation = BatchPreparation(rows, tables, page_size, kernels=False)
        self._layers = tuple(layers)

    def filled(self, batch: ForwardBatch) -> ForwardBatch:
        """A copy of a batch that has not run yet, filled from rows and tables."""
        copy = replace(batch, side=SideRequest())
        self._preparation.fill(copy)
        return copy

    def slots(self, batch: ForwardBatch) -> list[Tensor]:
        """Of each layer, where a filled batch writes: [T] int64, 0 for rows that have ended."""
        return [batch.kv[layer.kv_group].out_cache_loc for layer in self._layers]

    def keys_values(
        self, batch: ForwardBatch, layers: Sequence[int] | None = None
    ) -> list[KeyValue]:
        """What lies at the slots of a filled batch now: copies, of all layers or some."""
        slots, wanted = self.slots(batch), range(len(self._layers)) if layers is None else layers
        return [
            (keys.index_select(0, slots[place]), values.index_select(0, slots[place]))
            for place in wanted
            for keys, values in (self._places(place),)
        ]

    def put_back(self, batch: ForwardBatch, contents: Sequence[KeyValue]) -> None:
        """Write what `keys_values` of all layers read to where it lay."""
        for place, (slots, (key, value)) in enumerate(
            zip(self.slots(batch), contents, strict=True)
        ):
            keys, values = self._places(place)
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)

    def _places(self, place: int) -> tuple[Tensor, Tensor]:
        """[P * page, K, D] and [P * page, K, Dv] of a layer."""
        layer = self._layers[place]
        keys, values = layer.pool.key_value(layer.pool_layer)
        return keys.flatten(0, 1), values.flatten(0, 1)


class ReferenceStep:
    """Runs a step eagerly by torch operators and torch_native attention, and leaves no trace: what
    it writes to the pool is read and taken back, no row is advanced.

    Weights are those of the model in the form they have; a product of packed weights is oneDNN's
    here too.

    Args:
        rounding: relative size of the noise that shakes the second run.
    """

    def __init__(
        self,
        reader: StepReader,
        model: CausalDecoder,
        plan: Plan,
        *,
        rounding: float,
    ) -> None:
        self._reader, self._model, self._rounding = reader, model, rounding
        self._backends = _native_backends(model.traits, plan)
        self._noise = torch.Generator(torch.device(plan.device.value)).manual_seed(0)

    def run(self, batch: ForwardBatch) -> StepContents:
        """Keys, values and logits that `batch`, which has not run yet, should have."""
        reader = self._reader
        filled = reader.filled(batch)
        before = reader.keys_values(filled)
        with replaced(self._as_reference()):
            for backend in self._backends.values():
                backend.prepare_metadata(filled)
            with self._shaken():
                shaken, shaken_logits = self._forward(filled)
            written, logits = self._forward(filled)
        reader.put_back(filled, before)
        return StepContents(
            batch=filled,
            slots=reader.slots(filled),
            keys_values=written,
            token_index=None if filled.sampling is None else filled.sampling.token_index,
            logits=logits,
            shaken=shaken,
            shaken_logits=shaken_logits,
        )

    def _forward(self, filled: ForwardBatch) -> tuple[list[KeyValue], Tensor | None]:
        """What it writes, and the logits of the rows that sample."""
        model, sampling = self._model, filled.sampling
        hidden = model(filled.input_ids, filled.positions, filled)
        logits = None
        if sampling is not None:
            logits = model.compute_logits(hidden.index_select(0, sampling.token_index))
        return self._reader.keys_values(filled), logits

    @contextmanager
    def _shaken(self) -> Iterator[None]:
        """Within: the residual stream is rounded once more in front of every layer, at random."""
        noise, rounding = self._noise, self._rounding

        def shake(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            stream: Tensor = given[0]  # [T, H]
            drawn = torch.randn(stream.shape, generator=noise, device=stream.device)
            return ((stream.float() * (1 + rounding * drawn)).to(stream.dtype), *given[1:])

        hooks = [layer.register_forward_pre_hook(shake) for layer in self._model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _as_reference(self) -> Iterator[tuple[object, str, Any]]:
        yield self._model.model, "taps", ()
        for module in self._model.modules():
            if hasattr(module, "tap"):  # of a mixture of experts
                yield module, "tap", None
            if hasattr(module, "operators"):
                yield module, "operators", TORCH_OPERATORS
            if isinstance(module, SelfAttention):
                yield module, "backend", self._backends[module.kv_group]


def _native_backends(traits: ModelTraits, plan: Plan) -> dict[str, AttentionBackend]:
    """torch_native for each KV group: it takes any shape."""
    return {
        group.name: TorchNativeBackend(AttentionSetting.of(plan, traits, group))
        for group in traits.kv_groups
    }
