"""The matrix of the attention kernels on a CUDA device, against the twins in float64.

Hundreds of kernels are compiled: run with `-m gpu -n 8` or more.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make

from headrace.kernels import attention_twins
from headrace.kernels.decode_splits import DecodeScratch
from headrace.kernels.extend_attention_settings import extend_settings

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton", reason="the kernels need the triton package")
decode_kernels = pytest.importorskip("headrace.kernels.decode_attention_triton")
extend_kernels = pytest.importorskip("headrace.kernels.extend_attention_triton")
norm_kernels = pytest.importorskip("headrace.kernels.norms_triton")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
OTHERS = (torch.float16, torch.float32)
HEADS = [(4, 4), (6, 2), (8, 1), (32, 8)]
DIMS = [64, 80, 96, 112, 128, 256]
PAGES = [1, 16, 64, 128]
TRAITS = [
    {},
    {"window": 16},
    {"soft_cap": 3.0},
    {"sinks": True},
    {"window": 100, "sinks": True},
    {"window": 1, "soft_cap": 30.0},
    {"window": 4096, "soft_cap": 5.0, "sinks": True},
]
LENGTHS = (1, 15, 16, 17, 200, 4097, 0)
CHUNKS = (1, 15, 9, 17, 33, 17, 0)  # the last tokens of LENGTHS, the rest is prefix


def matrix():
    """Every two of dtype, head shape, size and page; traits take turns.

    Each case is three kernels to compile, those of float32 for many seconds.
    """
    for index, (dim, page) in enumerate(itertools.product(range(len(DIMS)), range(len(PAGES)))):
        for dtype, turn in ((torch.bfloat16, 0), (OTHERS[(dim // 2 + page) % 2], 1)):
            heads = HEADS[(dim + page + 2 * turn) % len(HEADS)]
            traits = TRAITS[(2 * index + turn) % len(TRAITS)]
            shape = {"heads": heads, "dim": DIMS[dim], "page": PAGES[page]}
            yield Case(seq_lens=LENGTHS, dtype=dtype, **shape, **traits)


def trait_matrix():
    for traits, dtype in itertools.product(TRAITS, TOLERANCE):
        yield Case(seq_lens=LENGTHS, dtype=dtype, heads=(32, 8), dim=128, page=64, **traits)


CASES = [*matrix(), *trait_matrix(), Case(seq_lens=LENGTHS, dim=192, value_dim=128, heads=(8, 8))]


@pytest.fixture(autouse=True, scope="module")
def _device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def sums(batch, dtype=torch.float32):
    return torch.full(batch.q.shape[:2], -1.0, dtype=dtype, device="cuda")


def check(case, out, lse, twin_out, twin_lse):
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), twin_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), twin_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode(case):
    batch, lse = make(case), None
    exact, twin_lse = batch.double(), sums(batch, torch.float64)
    twin = attention_twins.paged_decode(*exact.decode_arguments(), **exact.options, lse=twin_lse)
    for splits in (1, 8):
        lse = sums(batch)
        out = decode_kernels.paged_decode(
            *batch.decode_arguments(), **batch.options, lse=lse, splits=splits
        )
        check(case, out, lse, twin, twin_lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_extend(case):
    case = replace(case, extend_lens=CHUNKS, padding=5)
    batch = make(case)
    exact, lse, twin_lse = batch.double(), sums(batch), sums(batch, torch.float64)
    named = {**batch.options, "max_extend": max(CHUNKS)}
    twin = attention_twins.paged_extend(*exact.extend_arguments(), **named, lse=twin_lse)
    out = extend_kernels.paged_extend(*batch.extend_arguments(), **named, lse=lse)
    check(case, out, lse, twin, twin_lse)


@pytest.mark.parametrize("traits", TRAITS, ids=str)
@pytest.mark.parametrize(("dim", "page"), [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("heads", [(6, 2), (32, 8)])
def test_extend_by_whole_blocks(heads, dim, page, traits):
    """Blocks by descriptors, of both layouts of a pool, into an uninitialised output."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the tensor memory accelerator needs compute capability 9.0")
    shape = {"heads": heads, "dim": dim, "page": page, "dtype": torch.bfloat16}
    batch = make(Case(seq_lens=LENGTHS, extend_lens=CHUNKS, padding=5, **shape, **traits))
    exact, twin_lse = batch.double(), sums(batch, torch.float64)
    named = {**batch.options, "max_extend": max(CHUNKS)}
    twin = attention_twins.paged_extend(*exact.extend_arguments(), **named, lse=twin_lse)
    whole = {"row_bytes": 4 * dim, "element": 2, "shared_memory": 227 * 1024, "by_block": True}
    settings = extend_settings(**whole)
    assert settings.by_block
    for heads_first in (False, True):
        caches = batch.k_cache, batch.v_cache
        if heads_first:
            caches = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches)
        arguments = (batch.q, *caches, *batch.extend_arguments()[3:])
        lse = sums(batch)
        out = extend_kernels.paged_extend(
            *arguments, **named, lse=lse, settings=settings, covered=sum(CHUNKS)
        )
        check(batch.case, out, lse, twin, twin_lse)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_long_extend_without_prefix(dtype, window):
    lens = (4097, 200)
    case = Case(seq_lens=lens, extend_lens=lens, dtype=dtype, window=window, heads=(4, 2), page=64)
    batch = make(case)
    exact, lse, twin_lse = batch.double(), sums(batch), sums(batch, torch.float64)
    named = {**batch.options, "max_extend": 4097}
    twin = attention_twins.paged_extend(*exact.extend_arguments(), **named, lse=twin_lse)
    out = extend_kernels.paged_extend(*batch.extend_arguments(), **named, lse=lse)
    check(case, out, lse, twin, twin_lse)


def compiled():
    kernels = decode_kernels.decode_kernel, extend_kernels.extend_kernel
    device = torch.cuda.current_device()
    return sum(len(kernel.device_caches[device][0]) for kernel in kernels)


def test_batches_of_any_size_use_the_same_kernels():
    """After one warm-up of each form nothing compiles: a graph capture may not."""
    # A head size that no other test uses: none of its kernels is there yet.
    traits = {"dtype": torch.bfloat16, "heads": (16, 8), "dim": 88, "sinks": True}
    before = compiled()
    counts = []
    for lens, window in (((64, 64), 16), ((1, 2, 3), 7), ((33,), 1), ((5,) * 17, 16)):
        case = Case(seq_lens=lens, window=window, **traits)
        decode, extend = make(case), make(replace(case, extend_lens=(1,) * len(lens)))
        for splits in (1, 2, 16):
            decode_kernels.paged_decode(
                *decode.decode_arguments(), **decode.options, splits=splits, lse=sums(decode)
            )
        # Index tensors cut from larger ones lie at odd addresses.
        odd = torch.cat((extend.seq_lens[:1], extend.extend_lens))[1:]
        arguments = (*extend.extend_arguments()[:5], odd, extend.prefix_lens)
        extend_kernels.paged_extend(
            *arguments, **extend.options, max_extend=len(lens), lse=sums(extend)
        )
        counts.append(compiled() - before)
    assert counts == [3, 3, 3, 3]  # decode whole and split, extend


def test_one_graph_serves_all_lengths_up_to_its_bound():
    case = Case(seq_lens=(1000, 1000, 1000), heads=(32, 8), dim=128, page=64, dtype=torch.bfloat16)
    batch = make(case)
    out, lse = torch.zeros_like(batch.q), sums(batch)

    def step():
        decode_kernels.paged_decode(
            *batch.decode_arguments(), **batch.options, max_seq_len=1000, out=out, lse=lse
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ((1, 17, 1000), (0, 640, 63), (999, 0, 0)):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        exact, twin_lse = batch.double(), sums(batch, torch.float64)
        twin = attention_twins.paged_decode(
            *exact.decode_arguments(), **exact.options, lse=twin_lse
        )
        check(case, out, lse, twin, twin_lse)


def test_a_chain_of_dependent_launches_is_ordered():
    """A missing wait reads queries or parts that are not written yet, or overwrites parts in use.

    Each layer's queries are the result of the one in front; all share one scratch. The tables lie
    there long before.
    """
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("dependent launch needs compute capability 9.0")
    lens = (900, 1, 130, 0, 640, 17, 333, 64)
    case = Case(seq_lens=lens, heads=(32, 8), dim=128, page=64, dtype=torch.bfloat16)
    decode = make(case)
    extend = make(replace(case, extend_lens=(1, 1, 1, 0, 1, 1, 1, 1)))
    norm = torch.ones(128, dtype=torch.bfloat16, device="cuda")
    place = {"batch": 8, "heads": 32, "splits": 16, "value_dim": 128}
    scratch = DecodeScratch.allocate(**place, device=torch.device("cuda"))

    decoded = {**decode.options, "scratch": scratch}
    extended = {**decode.options, "max_extend": 1}
    zeros = torch.zeros(24, *decode.q.shape, dtype=torch.bfloat16, device="cuda")

    def chain(pdl):
        q, lengths = decode.q, extend.extend_arguments()[4:]
        for layer in range(24):
            q = norm_kernels.rms_norm(q, norm, eps=1e-6, pdl=pdl)
            paged = (q, *decode.decode_arguments()[1:4])
            if layer % 4 == 3:
                named = {**extended, "out": zeros[layer], "pdl": pdl}
                q = extend_kernels.paged_extend(*paged, *lengths, **named)
            else:
                ready = {"pdl": pdl, "tables_ready": pdl and layer % 2 == 0}
                named = {**decoded, **ready, "splits": (1, 16, 8)[layer % 3]}
                q = decode_kernels.paged_decode(*paged, decode.seq_lens, **named)
        return q.clone()

    expected = chain(pdl=False)
    assert torch.equal(chain(pdl=True), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(pdl=True)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
