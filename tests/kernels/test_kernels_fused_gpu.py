"""The matrix of the fused kernels on a CUDA device, against the twins in float64.

Some hundreds of kernels are compiled: run with `-m gpu -n 8` or more.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from fused_cases import Heads, Product, assert_close, check_heads, check_product, draw, strided

from headrace.kernels import gated_activation, matvec, norm_rope_write, norms
from headrace.kernels.gated_activation import summed
from headrace.kernels.matvec_settings import MatvecSettings, matvec_settings

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton", reason="the kernels need the triton package")
matvec_kernels = pytest.importorskip("headrace.kernels.matvec_triton")
norm_kernels = pytest.importorskip("headrace.kernels.norms_triton")
gate_kernels = pytest.importorskip("headrace.kernels.gated_activation_triton")
rope_kernels = pytest.importorskip("headrace.kernels.norm_rope_write_triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.float32, torch.float16)
TRAITS = [
    {},
    {"norm": True},
    {"bias": True, "residual": True},
    {"norm": True, "activation": "silu"},
    {"norm": True, "bias": True, "activation": "gelu_tanh"},
]
SHAPES = [(6144, 4096), (4096, 1024), (577, 576), (33, 4100), (1000, 12288), (1, 64), (129, 99)]
PRODUCTS = [
    *(
        Product(outputs=outputs, inputs=inputs, dtype=dtype, **traits)
        for place, ((outputs, inputs), traits) in enumerate(itertools.product(SHAPES, TRAITS))
        for dtype in (torch.bfloat16, OTHERS[place % 2])  # five traits: each meets both in turn
    ),
    # as the head: logits that are not rounded
    *(
        Product(outputs=outputs, inputs=1024, dtype=dtype, out_dtype=torch.float32, norm=True)
        for dtype, outputs in itertools.product(DTYPES, (4096, 257))
    ),
    # x times the norm's weight is beyond float16
    Product(outputs=64, inputs=512, norm=True, dtype=torch.float16, scale=8000.0),
]
HEADS = [
    Heads(tokens=tokens, heads=heads, dim=dim, rotary=rotary, page=page, dtype=dtype, norm=norm)
    for dtype, norm in itertools.product(DTYPES, (True, False))
    for tokens, heads, dim, rotary, page in (
        (1, (32, 8), 128, None, 64),
        (300, (16, 8), 128, None, 16),
        (700, (32, 8), 128, None, 64),  # several tokens a program
        (515, (9, 3), 64, 48, 1),
        (521, (3, 1), 256, None, 8),
        (17, (9, 3), 64, None, 1),
        (5, (4, 1), 256, None, 32),
        (33, (6, 2), 80, 32, 8),
        (8, (5, 5), 96, 72, 4),
    )
]


@pytest.fixture(autouse=True, scope="module")
def _device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module")
def hopper():
    """Whether dependent launch exists; where it does the matrix runs with it as well."""
    return torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_matvec(case, hopper):
    for pdl in {False, hopper}:
        check_product(case, matvec_kernels.matvec, matvec.matvec, pdl=pdl)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("traits", TRAITS, ids=str)
def test_matvec_prefetches(dtype, traits, hopper):
    if not hopper:
        pytest.skip("dependent launch needs compute capability 9.0")
    case = Product(outputs=130, inputs=1100, dtype=dtype, **traits)
    settings = MatvecSettings(rows=4, block=512, warps=4, prefetch=True)
    check_product(case, matvec_kernels.matvec, matvec.matvec, pdl=True, settings=settings)


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_norm_rope_write(case, hopper):
    for pdl in {False, hopper}:
        case = replace(case, padding=min(2, case.tokens - 1))
        check_heads(case, rope_kernels.norm_rope_write, norm_rope_write.norm_rope_write, pdl=pdl)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 4096), (257, 1024), (3, 577), (2, 32768), (9, 32, 128), (64, 3, 80), (2, 5, 256)]
)
def test_norms(dtype, shape, hopper):
    x = strided(draw(*shape, dtype=dtype, seed=0, scale=4.0))
    weight = draw(shape[-1], dtype=dtype, seed=1)
    for pdl in {False, hopper}:
        out = norm_kernels.rms_norm(x, weight, eps=1e-6, pdl=pdl)
        assert_close(out, norms.rms_norm(x.double(), weight, eps=1e-6), dtype)
        if len(shape) == 2:
            parts = draw(3, *shape, dtype=torch.float32, seed=2)
            out, total = norm_kernels.sum_rms_norm(parts, weight, eps=1e-6, dtype=dtype, pdl=pdl)
            assert torch.equal(total, summed(parts).to(dtype))
            assert_close(out, norms.rms_norm(total.double(), weight, eps=1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 12288), (300, 1536), (3, 77)])
def test_gated_activation(dtype, activation, shape, hopper):
    tokens, size = shape
    x = strided(draw(tokens, 2 * size, dtype=dtype, seed=0, scale=3.0))
    expected = gated_activation.gated_activation(x.double(), activation=activation)
    for pdl in {False, hopper}:
        out = gate_kernels.gated_activation(x, activation=activation, pdl=pdl)
        assert_close(out, expected, dtype)


def compiled():
    device = torch.cuda.current_device()
    kernels = (
        matvec_kernels._matvec_kernel,
        norm_kernels._norm_kernel,
        gate_kernels._gate_kernel,
        rope_kernels._rope_kernel,
    )
    return sum(len(kernel.device_caches[device][0]) for kernel in kernels)


def test_steps_of_any_size_use_the_same_kernels():
    """After one warm-up of each form nothing compiles: a graph capture may not."""
    # Sizes that no other test uses: none of their kernels is there yet.
    traits = {"inputs": 272, "dtype": torch.bfloat16, "norm": True}
    before, counts = compiled(), []
    for tokens in (3, 16, 2, 5):
        matvec_kernels.matvec(**Product(outputs=256 + tokens, **traits).arguments())
        x = draw(tokens, 272, dtype=torch.bfloat16, seed=0)
        norm_kernels.rms_norm(x, x[0], eps=1e-6)
        norm_kernels.sum_rms_norm(torch.stack((x, x)).float(), x[0], eps=1e-6, dtype=x.dtype)
        gate_kernels.gated_activation(x)
        named = Heads(tokens=tokens, dim=48, dtype=torch.bfloat16).arguments()
        # Index tensors cut from larger ones lie at odd addresses.
        for name in ("positions", "slots"):
            named[name] = torch.cat((named[name][:1], named[name]))[1:]
        rope_kernels.norm_rope_write(**named)
        counts.append(compiled() - before)
    assert counts == [5, 5, 5, 5]


@pytest.mark.parametrize("dependent_launch", [True, False])
def test_a_chain_in_a_graph_is_ordered(dependent_launch, hopper):
    """Dependent launch lets kernels overlap: a missing wait would read what is not written yet.

    One kernel of a layer may be launched without it.
    """
    if not hopper:
        pytest.skip("dependent launch needs compute capability 9.0")
    size, layers, seeds = 2048, 24, iter(range(100))

    def weight(rows, columns):
        return draw(rows, columns, dtype=torch.bfloat16, seed=next(seeds), scale=columns**-0.5)

    stack = [(weight(2 * size, size), weight(size, size)) for _ in range(layers)]
    norm = draw(size, dtype=torch.bfloat16, seed=200)
    x = draw(1, size, dtype=torch.bfloat16, seed=201)
    down_settings = replace(matvec_settings(size, size), dependent_launch=dependent_launch)

    def chain(pdl):
        hidden = x.clone()
        for up, down in stack:
            named = {"norm_weight": norm, "eps": 1e-6, "pdl": pdl}
            inner = matvec_kernels.matvec(hidden, up, **named, activation="silu")
            named = {"residual": hidden, "pdl": pdl, "settings": down_settings}
            hidden = matvec_kernels.matvec(inner, down, **named)
        return hidden

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
