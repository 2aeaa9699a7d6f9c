"""On a CUDA device: the same bits whatever the number of rows, the tile, the chunk, the path.

The interpreter shows that the forms of a kernel add in one order; here it shows that tensor cores
do. Run with `-m gpu -n 14`: some dozens of kernels are compiled.
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make
from fused_cases import assert_close, draw, exact

from headrace.kernels import attention_twins as twins
from headrace.kernels import few_rows as product_twin
from headrace.kernels.device_sizes import HOPPER
from headrace.kernels.invariant_product_settings import ProductSettings, product_settings
from headrace.kernels.row_blocks import telling_factors

pytestmark = pytest.mark.gpu

pytest.importorskip("triton", reason="the kernels need the triton package")
product_kernels = pytest.importorskip("headrace.kernels.invariant_product_triton")
attention_kernels = pytest.importorskip("headrace.kernels.invariant_attention_triton")
norm_kernels = pytest.importorskip("headrace.kernels.norms_triton")
rope_kernels = pytest.importorskip("headrace.kernels.norm_rope_write_triton")

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
MOST = 4096
ROWS = (1, 2, 3, 8, 17, 33, 64, 65, 128, 129, 200, 256, 1000, 1024)


@pytest.fixture(autouse=True)
def _cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def hopper(_cuda):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"tiles differ on GPUs of compute capability {HOPPER} only")


def product_arguments(rows, outputs, inputs, dtype, traits):
    gated = "activation" in traits
    weights = outputs * (2 if gated else 1)
    return {
        "x": draw(rows, inputs, dtype=dtype, seed=0),
        "weight": draw(weights, inputs, dtype=dtype, seed=1, scale=inputs**-0.5),
        "bias": draw(weights, dtype=dtype, seed=2) if "bias" in traits else None,
        "residual": draw(rows, outputs, dtype=dtype, seed=3) if "residual" in traits else None,
        "activation": traits.get("activation"),
        "dtype": traits.get("dtype"),
    }


def of_rows(named, rows):
    """The same product of some of the rows."""
    residual = named["residual"]
    cut = {"x": named["x"][rows], "residual": None if residual is None else residual[rows]}
    return named | cut


PRODUCTS = [
    (4096, 4096, {"residual": True}),
    (6144, 4096, {"bias": True}),
    (12288, 4096, {"activation": "silu"}),
    (1024, 3072, {"residual": True, "bias": True}),
    (1003, 520, {"dtype": FLOAT}),
    (300, 136, {"activation": "gelu_tanh", "bias": True}),
    (64, 64, {"residual": True}),  # one block of columns, in every tile
    (64, 128, {"residual": True, "bias": True}),
    (128, 64, {"activation": "silu"}),
    (500, 99, {}),  # rows that no descriptor takes
]


def telling(named):
    """The same with sums that nearly cancel: rounded to bfloat16 they still show their order."""
    weights, inputs = named["weight"].shape
    generator = torch.Generator().manual_seed(0)
    x, weight = telling_factors(MOST, weights, inputs, BRAIN, generator)
    small = {key: named[key] * 2.0**-20 for key in ("bias", "residual") if named[key] is not None}
    return named | small | {"x": x.cuda(), "weight": weight.cuda()}


@pytest.mark.parametrize(("outputs", "inputs", "traits"), PRODUCTS, ids=str)
def test_sums_that_nearly_cancel_have_the_same_bits_among_any_rows(outputs, inputs, traits):
    named = telling(product_arguments(MOST, outputs, inputs, BRAIN, traits))
    product = product_kernels.invariant_product
    whole = product(**named)
    for rows in ROWS:
        some = slice(MOST - rows, MOST)
        assert torch.equal(product(**of_rows(named, some)), whole[some]), f"{rows} rows"


@pytest.mark.parametrize(("outputs", "inputs", "traits"), PRODUCTS, ids=str)
def test_a_product_has_the_same_bits_among_any_rows(outputs, inputs, traits):
    named = product_arguments(MOST, outputs, inputs, BRAIN, traits)
    product = product_kernels.invariant_product
    whole = product(**named)
    sample = slice(MOST - 70, MOST)
    doubled = {key: exact(value) for key, value in of_rows(named, sample).items()}
    meant = product_twin.few_rows(**doubled | {"dtype": None})
    assert_close(whole[sample], meant, BRAIN)
    for rows in ROWS:
        for first in (0, 511, MOST - rows):
            some = slice(first, first + rows)
            found = product(**of_rows(named, some), pdl=rows % 2 == 0)
            assert torch.equal(found, whole[some]), f"{rows} rows from {first}"


TILES = [
    *[(64, 16, 128, 5), (64, 32, 64, 3), (64, 32, 256, 4), (64, 64, 128, 4), (64, 128, 64, 4)],
    *[(64, 256, 64, 4), (128, 32, 64, 4), (128, 64, 64, 4), (128, 128, 64, 4), (128, 256, 64, 3)],
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_product_has_the_same_bits_by_any_tile(tile, gated):
    tokens, weights, block, stages = tile
    rows, outputs, inputs = 200, 1000, 4096
    traits = {"activation": "silu"} if gated else {"residual": True}
    named = product_arguments(rows, outputs, inputs, BRAIN, traits)
    product = product_kernels.invariant_product
    whole = product(**named)
    shape = {"tokens": tokens, "weights": weights * (2 if gated and weights < 32 else 1)}
    for warps, persistent in ((4, False), (8, True)):
        if tokens // 16 < warps:
            continue
        own = ProductSettings(
            **shape, block=block, stages=stages, warps=warps, persistent=persistent
        )
        if own.tokens * own.weights // warps > 1 << 12:
            continue  # more sums than a warp has registers
        assert torch.equal(product(**named, settings=own), whole), own


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_other_dtypes_of_products(dtype):
    named = product_arguments(600, 520, 640, dtype, {"residual": True})
    product = product_kernels.invariant_product
    whole = product(**named)
    meant = product_twin.few_rows(**{key: exact(value) for key, value in named.items()})
    assert_close(whole, meant, dtype)
    for rows in (1, 8, 70, 200):
        assert torch.equal(product(**of_rows(named, slice(0, rows))), whole[:rows])


@pytest.mark.usefixtures("hopper")
def test_tiles_of_one_shape_do_differ():
    """Else the tests above would compare a kernel with itself."""
    given = {"gated": False, "dtype": BRAIN, "device": torch.device("cuda")}
    assert len({product_settings(rows, 4096, 4096, **given) for rows in ROWS}) > 2


@pytest.mark.parametrize("size", [4096, 1024, 576])
def test_a_norm_has_the_same_bits_among_any_rows(size):
    x, weight = draw(MOST, size, dtype=BRAIN, seed=0), draw(size, dtype=BRAIN, seed=1)
    whole = norm_kernels.rms_norm(x, weight, eps=1e-6)
    for rows in ROWS:
        for first in (0, MOST - rows):
            some = slice(first, first + rows)
            assert torch.equal(norm_kernels.rms_norm(x[some], weight, eps=1e-6), whole[some])


@pytest.mark.parametrize("dim", [128, 64, 80])
def test_a_rotation_has_the_same_bits_among_any_tokens(dim):
    heads, kv_heads, page, tokens = 8, 2, 64, 700
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=BRAIN, seed=0)
    norms = {"q_norm": draw(dim, dtype=BRAIN, seed=1), "k_norm": draw(dim, dtype=BRAIN, seed=2)}
    table = draw(tokens, dim, dtype=FLOAT, seed=3)
    place = torch.arange(tokens, device="cuda")
    tile = rope_kernels.tile_tokens(1 << 20, dim)
    caches = []

    def turned(some):
        pools = [torch.zeros(tokens // page + 2, page, kv_heads, dim, dtype=BRAIN, device="cuda")]
        pools += [torch.zeros_like(pools[0])]
        caches.append(pools)
        where = place[some].contiguous()
        return rope_kernels.norm_rope_write(
            qkv[some], table, where, *pools, where + page, **norms, eps=1e-6, tile=tile
        )

    whole = turned(slice(0, tokens))
    for rows in (1, 2, 17, 130, 600):
        some = slice(tokens - rows, tokens)
        assert torch.equal(turned(some), whole[some])
        for first, other in zip(*caches[:: len(caches) - 1], strict=True):
            written = slice(page + tokens - rows, page + tokens)
            assert torch.equal(first.flatten(0, 1)[written], other.flatten(0, 1)[written])


ATTENTIONS = [
    Case(seq_lens=(3000,), heads=(32, 8), dim=128, page=64, dtype=BRAIN),
    Case(seq_lens=(2500,), heads=(8, 2), dim=64, page=16, dtype=BRAIN, sinks=True),
    Case(seq_lens=(2100,), heads=(16, 4), dim=256, page=64, dtype=BRAIN, window=512),
    Case(seq_lens=(2600,), heads=(14, 2), dim=64, page=64, dtype=HALF, soft_cap=20.0),
    Case(seq_lens=(900,), heads=(4, 2), dim=32, page=64, dtype=FLOAT),
]


def kernel_of(batch):
    return attention_kernels.InvariantAttention(
        batch.q, batch.k_cache, batch.v_cache, **batch.options
    )


def attended(batch, queries, prefix, **options):
    """The last `queries` of a sequence of `prefix + queries` tokens, as one chunk."""
    kernel, place = kernel_of(batch), {"dtype": torch.int32, "device": batch.q.device}
    q = batch.q[prefix : prefix + queries]
    out = q.new_empty(*q.shape[:2], batch.v_cache.shape[3])
    lengths = [torch.tensor([value], **place) for value in (0, queries, prefix)]
    kernel.extend(q, batch.page_table, *lengths, max_extend=queries, out=out, **options)
    return out


def decoded(batch, positions, **options):
    """A step of one token for each of some positions of the sequence, as rows of a batch."""
    q = batch.q[positions]
    out = q.new_empty(*q.shape[:2], batch.v_cache.shape[3])
    table = batch.page_table.expand(len(positions), -1).contiguous()
    lengths = torch.tensor(positions, dtype=torch.int32, device=q.device) + 1
    kernel_of(batch).decode(q, table, lengths, out=out, **options)
    return out


@pytest.mark.parametrize("case", ATTENTIONS, ids=lambda case: case.name)
def test_attention_has_the_same_bits_however_it_is_computed(case):
    (length,) = case.seq_lens
    batch = make(replace(case, extend_lens=case.seq_lens))
    whole = attended(batch, length, 0)
    last = 100
    doubled = replace(
        batch.double(),
        q=batch.q[-last:].double(),
        extend_lens=batch.extend_lens * 0 + last,
        prefix_lens=batch.prefix_lens + length - last,
    )
    meant = twins.paged_extend(*doubled.extend_arguments(), max_extend=last, **batch.options)
    assert_close(whole[-last:], meant, case.dtype)
    for queries in (1, 7, 64, 333, 800):
        for prefix in (0, min(255, length - queries), min(256, length - queries), length - queries):
            some = slice(prefix, prefix + queries)
            found = attended(batch, queries, prefix)
            assert torch.equal(found, whole[some]), f"{queries} behind {prefix}"
    positions = [0, 1, 63, 64, 255, 256, 257, 511, 800, length - 2, length - 1]
    for runs in (1, 2, 5, 64, None):
        assert torch.equal(decoded(batch, positions, runs=runs), whole[positions]), f"{runs} runs"
    for rows in (1, 3, 200):
        repeated = [positions[row % len(positions)] for row in range(rows)]
        assert torch.equal(decoded(batch, repeated), whole[repeated]), f"{rows} rows"


def test_a_chain_in_a_graph_has_the_bits_of_single_launches():
    """Norm, products, gate: with dependent launch, captured, padded rows behind."""
    size, layers, tokens = 2048, 12, 8
    x = draw(tokens, size, dtype=BRAIN, seed=0)
    norm = draw(size, dtype=BRAIN, seed=1)
    stack = [
        [
            draw(rows, columns, dtype=BRAIN, seed=10 * layer + number, scale=columns**-0.5)
            for number, (rows, columns) in enumerate(((size, size), (2 * size, size), (size, size)))
        ]
        for layer in range(layers)
    ]
    product = product_kernels.invariant_product

    def chain(hidden, pdl):
        for first, up, down in stack:
            normed = norm_kernels.rms_norm(hidden, norm, eps=1e-6, pdl=pdl)
            hidden = product(product(normed, first, pdl=pdl), first, residual=hidden, pdl=pdl)
            normed = norm_kernels.rms_norm(hidden, norm, eps=1e-6, pdl=pdl)
            inner = product(normed, up, activation="silu", pdl=pdl)
            hidden = product(inner, down, residual=hidden, pdl=pdl)
        return hidden

    expected = chain(x, pdl=False)
    alone = torch.cat([chain(x[row : row + 1], pdl=False) for row in range(tokens)])
    assert torch.equal(alone, expected)
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    padded = torch.cat((x, torch.full_like(x, torch.nan)))
    chain(padded, pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(padded, pdl)
    for _ in range(10):
        out.zero_()
        graph.replay()
        assert torch.equal(out[:tokens], expected)
