"""A model's forward as straight pieces of graph between attention calls.

The forward is traced once for one size (torch.fx, `make_fx`) and cut wherever attention stands, as
vLLM's piecewise compilation cuts (its torch.compile integration, 2025). Weights and KV memory
become inputs of the pieces, so that the pieces of equal layers are equal graphs, compiled once.
Nothing here knows a family: whatever block a model has, the pieces follow.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.execution.replacing import replaced
from headrace.execution.traced_operators import attend, replace_products
from headrace.layers.attention import SelfAttention
from headrace.layers.operators import TORCH_OPERATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Straight code up to an attention call, or to the end.

    Attributes:
        graph: its inputs are placeholders, in the order of `inputs`.
        inputs, outputs: places of values in the tables of `Pieces`.
        examples: a tensor like each input.
        layer: layer whose attention follows, `None` at the end.
        query, attended: places of that attention's q and result, -1 without one.
    """

    graph: fx.GraphModule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    examples: tuple[Tensor, ...]
    layer: int | None
    query: int
    attended: int

    @property
    def key(self) -> str:
        """Equal for pieces that one compiled function can serve."""
        shapes = [(tuple(x.shape), _strides(x), x.dtype, x.layout, x.device) for x in self.examples]
        return f"{self.graph.code}{shapes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The pieces in their order and the values that go between them.

    Attributes:
        values: one place per value: weights and KV memory hold tensors, the others `None`.
        arguments: places of the forward's arguments.
        result: place of the forward's result.
    """

    pieces: tuple[Piece, ...]
    values: tuple[Tensor | None, ...]
    arguments: tuple[int, ...]
    result: int


def cut(model: nn.Module, groups: Mapping[str, int], size: int, device: torch.device) -> Pieces:
    """Trace a step of `size` tokens and cut it.

    The trace runs the model once on zeros: it writes slot 0 and reads nothing of the pool.

    Args:
        model: (input_ids [T], positions [T], batch) -> hidden states [T, H].
        groups: page size of each KV group.
        device: where the model lies.

    Returns:
        Pieces whose arguments are input_ids [T], positions [T] and the slots [T] of each group.
    """
    batch = _traced_batch(size, device)

    def forward(input_ids: Tensor, positions: Tensor, *slots: Tensor) -> Tensor:
        batch.kv = {
            name: KvGroup(
                name=name, page_size=page_size, page_table=batch.rows[:, None], out_cache_loc=places
            )
            for (name, page_size), places in zip(groups.items(), slots, strict=True)
        }
        hidden: Tensor = model(input_ids, positions, batch)
        return hidden

    # of their own each: the trace tells values apart by their tensors
    arguments = [
        torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2 + len(groups))
    ]
    # One mode for what every node is like: by itself each would make its own, most of the time.
    nodes_like = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
    with replaced(_as_traced(model)), tracing(nodes_like):
        graph = make_fx(forward)(*arguments)
    graph.graph.eliminate_dead_code()
    replace_products(graph.graph)
    pieces = _Cutter(graph).cut()
    del graph
    gc.collect()  # of the trace too, whose cycles hold the weights: else they outlive the engine
    return pieces


def _traced_batch(size: int, device: torch.device) -> ForwardBatch:
    """Of one token a row. Between attention calls it makes no difference, but that nobody looks for
    fresh keys."""
    mode = ForwardMode.DECODE
    return ForwardBatch(
        mode=mode,
        rows=torch.zeros(size, dtype=torch.int64, device=device),
        bounds=HostBounds(seq_lens=[0] * size, extend_lens=[0] * size),
        facts=BatchFacts(mode=mode, tokens=size, live_tokens=0, sequences=size, max_length=0),
    )


class _AttentionMark:
    """Takes the place of a backend while a model is traced."""

    def forward(self, q: Tensor, layer: SelfAttention, batch: ForwardBatch, **_: Any) -> Tensor:
        out: Tensor = attend(q, layer.layer_id, layer.v_head_dim)
        return out


def _as_traced(model: nn.Module) -> Iterator[tuple[object, str, Any]]:
    """Plain operators, which a compiler fuses better than it fuses ours; marks for attention."""
    for module in model.modules():
        if hasattr(module, "operators"):
            yield module, "operators", TORCH_OPERATORS
        if isinstance(module, SelfAttention):
            yield module, "backend", _AttentionMark()


class _Cutter:
    """Copies the nodes of a traced graph into one graph per piece."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self._traced = traced
        self._values: list[Tensor | None] = []
        self._examples: list[Tensor] = []
        self._place: dict[fx.Node, int] = {}
        self._constants: dict[int, int] = {}

    def cut(self) -> Pieces:
        pieces: list[Piece] = []
        arguments: list[int] = []
        nodes: list[fx.Node] = []
        result = -1
        for node in self._traced.graph.nodes:
            if node.op == "placeholder":
                arguments.append(self._add(node, node.meta["val"]))
            elif node.op == "get_attr":
                self._add_constant(node)
            elif node.op == "output":
                pieces.append(self._piece(nodes, None))
                result = self._place[node.all_input_nodes[0]]
            elif node.target is attend:
                pieces.append(self._piece(nodes, node))
                nodes = []
            else:
                nodes.append(node)
        return Pieces(
            pieces=tuple(pieces),
            values=tuple(self._values),
            arguments=tuple(arguments),
            result=result,
        )

    def _add(self, node: fx.Node, example: Tensor, value: Tensor | None = None) -> int:
        self._place[node] = len(self._values)
        self._values.append(value)
        self._examples.append(example)
        return self._place[node]

    def _add_constant(self, node: fx.Node) -> None:
        tensor = getattr(self._traced, str(node.target))
        assert isinstance(tensor, Tensor)
        if id(tensor) in self._constants:
            self._place[node] = self._constants[id(tensor)]
        else:
            self._constants[id(tensor)] = self._add(node, tensor, tensor.detach())

    def _piece(self, nodes: Sequence[fx.Node], attention: fx.Node | None) -> Piece:
        graph, inside = fx.Graph(), {}
        inputs: list[int] = []
        inner = set(nodes)
        used = [node for item in nodes for node in item.all_input_nodes if node not in inner]
        for node in dict.fromkeys(used):
            inside[node] = graph.create_node("placeholder", f"x{len(inputs)}")
            inputs.append(self._place[node])
        for index, node in enumerate(nodes):
            inside[node] = graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, inside.__getitem__),
                fx.map_arg(node.kwargs, inside.__getitem__),
                name=f"n{index}",
            )
        outputs = [node for node in nodes if any(user not in inner for user in node.users)]
        graph.output(tuple(inside[node] for node in outputs))
        places = tuple(self._add(node, node.meta["val"]) for node in outputs)
        query = attended = -1
        layer: int | None = None
        if attention is not None:
            q, layer = attention.all_input_nodes[0], cast("int", attention.args[1])
            query = self._place[q]
            attended = self._add(attention, attention.meta["val"])
        return Piece(
            graph=fx.GraphModule(nn.Module(), graph),
            inputs=tuple(inputs),
            outputs=places,
            examples=tuple(self._examples[place] for place in inputs),
            layer=layer,
            query=query,
            attended=attended,
        )


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()
