"""A forward whose pieces between attention calls are compiled by torch.compile's inductor.

Equal layers share one compiled piece, and so do engines of one process that have equal ones, as
`verify` makes them. Attention stays with the caller, since its sizes follow the lengths. Compiled
code outlives the process in inductor's cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.base.errors import UnsupportedError
from headrace.batch.forward_batch import ForwardBatch
from headrace.execution.pieces import Piece, Pieces, cut
from headrace.layers.attention import SelfAttention

# Packed weights are given to inductor as plain ones, so it must not check their strides.
INDUCTOR_OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}

Function = Callable[..., Sequence[Tensor]]
# What this process has compiled, by all it follows from; inductor would keep the code anyway.
_COMPILED: dict[tuple[str, int], Function] = {}
Attend = Callable[[SelfAttention, Tensor], Tensor]
"""(layer, q [T, N, D]) -> [T, N, Dv]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPiece:
    """A piece, its function, and the layer whose attention follows.

    `dead`: places of values that nobody reads after it.
    """

    function: Function
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    layer: SelfAttention | None
    query: int
    attended: int


class CompiledForward:
    """The forward of a model for steps of `size` tokens.

    Args:
        model: (input_ids [T], positions [T], batch) -> hidden states [T, H].
        layers: its attention layers. groups: page size of each KV group.
        remedy: what to do where the compiler fails.

    Raises:
        UnsupportedError: the compiler of this machine cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[SelfAttention],
        groups: Mapping[str, int],
        size: int,
        *,
        device: torch.device,
        remedy: str,
    ) -> None:
        pieces = cut(model, groups, size, device)
        by_id = {layer.layer_id: layer for layer in layers}
        keys = [piece.key for piece in pieces.pieces]
        functions: dict[str, Function] = {}
        for key, piece in zip(keys, pieces.pieces, strict=True):
            if key not in functions:
                functions[key] = compile_piece(piece, remedy)
        self._groups = tuple(groups)
        self._values, self._arguments, self._result = pieces.values, pieces.arguments, pieces.result
        self._pieces = tuple(
            CompiledPiece(
                function=functions[key],
                inputs=piece.inputs,
                outputs=piece.outputs,
                dead=dead,
                layer=None if piece.layer is None else by_id[piece.layer],
                query=piece.query,
                attended=piece.attended,
            )
            for key, piece, dead in zip(keys, pieces.pieces, _dead_after(pieces), strict=True)
        )

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H]; attention by the backends of the layers, as the model does it."""
        slots = [batch.kv[name].out_cache_loc for name in self._groups]
        return self.run(
            (input_ids, positions, *slots), lambda layer, q: layer.backend.forward(q, layer, batch)
        )

    def run(self, arguments: Sequence[Tensor], attend: Attend) -> Tensor:
        """Hidden states [T, H] of input ids, positions and the slots of each group, [T] each."""
        values: list[Any] = list(self._values)
        for place, argument in zip(self._arguments, arguments, strict=True):
            values[place] = argument
        for piece in self._pieces:
            results = piece.function(*[values[place] for place in piece.inputs])
            for place, result in zip(piece.outputs, results, strict=True):
                values[place] = result
            if piece.layer is not None:
                values[piece.attended] = attend(piece.layer, values[piece.query])
            for place in piece.dead:
                values[place] = None
        hidden: Tensor = values[self._result]
        return hidden


def _dead_after(pieces: Pieces) -> list[tuple[int, ...]]:
    """For each piece the places of values that are read there for the last time."""
    last: dict[int, int] = {}
    for index, piece in enumerate(pieces.pieces):
        last.update(dict.fromkeys((*piece.inputs, *piece.outputs), index))
        if piece.layer is not None:
            last[piece.query] = index
    last.pop(pieces.result, None)
    dead: list[list[int]] = [[] for _ in pieces.pieces]
    for place, index in last.items():
        if pieces.values[place] is None:  # weights and KV memory stay
            dead[index].append(place)
    return [tuple(places) for places in dead]


def compile_piece(piece: Piece, remedy: str) -> Function:
    """Compile one piece for the shapes of its examples, if this process has none like it.

    Raises:
        UnsupportedError: the compiler of this machine cannot.
    """
    key = (piece.key, torch.get_num_threads())
    if key not in _COMPILED:
        _COMPILED[key] = _compile(piece, remedy)
    return _COMPILED[key]


def _compile(piece: Piece, remedy: str) -> Function:
    from torch import _inductor  # takes seconds to import, and most starts need none of it

    mode = FakeTensorMode()
    examples: list[Any] = [_plain(example, mode) for example in piece.examples]
    try:
        function: Function = _inductor.compile(piece.graph, examples, options=INDUCTOR_OPTIONS)
    except Exception as error:
        raise UnsupportedError(
            "The model cannot be compiled",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            remedy=remedy,
        ) from error
    return function


def _plain(example: Tensor, mode: FakeTensorMode) -> Tensor:
    """The example without data; a packed weight as a plain one of its shape."""
    if example.layout is torch.strided:
        return mode.from_tensor(example)
    with mode:
        return torch.empty(example.shape, dtype=example.dtype)
