"""Products of few rows on a CUDA device: shapes of models and odd ones, and chains of them.

Run with `-m gpu -n 8`: some dozens of kernels are compiled.
"""

from dataclasses import replace

import pytest
import torch
from fused_cases import assert_close, draw, exact, strided

from headrace.kernels import few_rows as twin
from headrace.kernels.few_rows_settings import FewRowsSettings
from headrace.kernels.gated_activation import summed

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton", reason="the kernels need the triton package")
kernels = pytest.importorskip("headrace.kernels.few_rows_triton")
norm_kernels = pytest.importorskip("headrace.kernels.norms_triton")

SETTINGS = FewRowsSettings(weights=128, block=64, warps=4, stages=3)
SHAPES = [(4096, 1024), (576, 576), (33, 4104), (1000, 4096), (129, 99)]
FORMS = [
    (SETTINGS, {}),
    (replace(SETTINGS, prefetch=256), {"activation": "silu", "bias": True}),
    (replace(SETTINGS, descriptor=False), {"activation": "gelu_tanh"}),
    (replace(SETTINGS, splits=3, prefetch=128), {"bias": True, "residual": True}),
    (replace(SETTINGS, splits=2, descriptor=False, weights=64), {"residual": True}),
]


@pytest.fixture(autouse=True)
def _hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a CUDA device of compute capability 9.0 or newer")


# Every form and shape is a kernel of its own, for each width of a tile of tokens and with dependent
# launch: each form meets two shapes, an even and an odd one in turn; float16 differs in nothing but
# the type.
CASES = [
    *((torch.bfloat16, SHAPES[(form + far) % 5], form) for form in range(5) for far in (0, 2)),
    (torch.float16, SHAPES[2], 3),
]


@pytest.mark.parametrize(("dtype", "shape", "form"), CASES, ids=str)
def test_agrees_with_the_twin(dtype, shape, form):
    (outputs, inputs), (settings, traits) = shape, FORMS[form]
    rows = outputs * (2 if "activation" in traits else 1)
    weight = draw(rows, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    for tokens, pdl in ((2, False), (17, True), (64, False), (130, True)):
        named = {
            "x": strided(draw(tokens, inputs, dtype=dtype, seed=0)),
            "weight": weight,
            "activation": traits.get("activation"),
            "bias": draw(rows, dtype=dtype, seed=2) if "bias" in traits else None,
            "residual": draw(tokens, outputs, dtype=dtype, seed=3)
            if "residual" in traits
            else None,
        }
        out = kernels.few_rows(**named, settings=settings, pdl=pdl)
        expected = twin.few_rows(**{name: exact(value) for name, value in named.items()})
        assert_close(summed(out), expected, dtype)


def test_a_chain_in_a_graph_is_ordered():
    """As the chain of single rows: a missing wait would read parts that are not written yet."""
    size, layers, tokens = 2048, 24, 8
    stack = [
        [
            draw(rows, size, dtype=torch.bfloat16, seed=2 * layer + rows // size, scale=size**-0.5)
            for rows in (2 * size, size)
        ]
        for layer in range(layers)
    ]
    norm = draw(size, dtype=torch.bfloat16, seed=200)
    x = draw(tokens, size, dtype=torch.bfloat16, seed=201)
    split = replace(SETTINGS, weights=64, splits=4, prefetch=128)

    def chain(pdl):
        hidden = x
        normed = norm_kernels.rms_norm(x, norm, eps=1e-6, pdl=pdl)
        for up, down in stack:
            named = {"settings": SETTINGS, "activation": "silu", "pdl": pdl}
            inner = kernels.few_rows(normed, up, **named)
            parts = kernels.few_rows(inner, down, residual=hidden, settings=split, pdl=pdl)
            named = {"eps": 1e-6, "dtype": torch.bfloat16, "pdl": pdl}
            normed, hidden = norm_kernels.sum_rms_norm(parts, norm, **named)
        return normed

    expected = chain(pdl=False)
    chain(pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(pdl=True)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
