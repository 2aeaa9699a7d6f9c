"""Operators that a traced forward holds in place of what a compiler cannot take apart.

`attend` marks where attention stands. `packed_linear` is oneDNN's product over a packed weight that
is an input of the graph: inductor's own lowering of it takes weights that are constants only, and
constants would make every layer a graph of its own.
"""

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("headrace", "FRAGMENT")
_LIBRARY.define("attend(Tensor q, int layer, int v_head_dim) -> Tensor")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define("packed_linear_add(Tensor x, Tensor addend, Tensor weight, Tensor? bias) -> Tensor")

_product = torch.ops.mkldnn._linear_pointwise.default
_product_add = torch.ops.mkldnn._linear_pointwise.binary


def _attend(q: Tensor, layer: int, v_head_dim: int) -> Tensor:
    """q [T, N, D] -> [T, N, Dv]; traced, and cut out before anything is compiled."""
    return q.new_zeros(q.shape[0], q.shape[1], v_head_dim)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, inputs] -> [T, outputs]"""
    return _product(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _packed_linear_add(x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `_packed_linear`, plus addend [T, outputs]."""
    return _product_add(x, addend, weight, bias, "add")  # type: ignore[no-any-return]


def _like_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _like_product_add(x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _like_product(x, weight, bias)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
for _key in ("CPU", "MkldnnCPU"):  # a packed weight is a tensor of the second kind
    _LIBRARY.impl("packed_linear", _packed_linear, _key)
    _LIBRARY.impl("packed_linear_add", _packed_linear_add, _key)
torch.library.register_fake("headrace::packed_linear", _like_product, lib=_LIBRARY)
torch.library.register_fake("headrace::packed_linear_add", _like_product_add, lib=_LIBRARY)

attend = torch.ops.headrace.attend.default


def replace_products(graph: fx.Graph) -> None:
    """Put `packed_linear` where the products of oneDNN's weight format stand."""
    for node in graph.nodes:
        if node.target is _product:
            node.target, node.args = torch.ops.headrace.packed_linear.default, node.args[:3]
        elif node.target is _product_add:
            node.target, node.args = torch.ops.headrace.packed_linear_add.default, node.args[:4]
