"""The Triton kernels against their twins: a pairwise selection, in the interpreter without a GPU.

The full matrix is in `test_kernels_attention_gpu.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make

from headrace.base.errors import UnsupportedError
from headrace.kernels import attention_twins, support_triton
from headrace.kernels.decode_splits import DecodeScratch
from headrace.kernels.extend_attention_settings import ExtendSettings, extend_settings

triton = pytest.importorskip("triton", reason="the kernels need the triton package")
decode_kernels = pytest.importorskip("headrace.kernels.decode_attention_triton")
extend_kernels = pytest.importorskip("headrace.kernels.extend_attention_triton")
attention_math = pytest.importorskip("headrace.kernels.attention_math_triton")
whole_blocks = pytest.importorskip("headrace.kernels.whole_blocks_triton")

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FLOAT: 1e-5, BRAIN: 2e-2, HALF: 2e-3}

DECODE = [
    (Case(seq_lens=(1, 15, 16, 17, 200), page=16), 1),
    (Case(seq_lens=(1, 0, 130), heads=(6, 2), dim=80, page=1, sinks=True), 4),
    (Case(seq_lens=(200, 7), heads=(8, 1), dim=128, page=64, dtype=BRAIN, window=33), 2),
    (Case(seq_lens=(17, 64), heads=(32, 8), dim=96, page=128, dtype=HALF, soft_cap=2.0), 1),
    (Case(seq_lens=(40,), heads=(8, 1), dim=256, page=4, soft_cap=3.0, window=16), 1),
    (Case(seq_lens=(90, 0), dim=112, value_dim=64, page=2, dtype=BRAIN, sinks=True), 3),
    (Case(seq_lens=(129,), heads=(6, 2), dim=64, page=32, window=1, sinks=True), 2),
    (Case(seq_lens=(300,), heads=(20, 1), dim=64, value_dim=80, page=8, soft_cap=5.0), 20),
]
EXTEND = [
    Case(seq_lens=(1, 15, 16, 17), extend_lens=(1, 15, 16, 17), page=16),
    Case(seq_lens=(70, 0, 3), extend_lens=(20, 0, 3), heads=(6, 2), dim=80, page=1, sinks=True),
    Case(seq_lens=(150, 9), extend_lens=(1, 9), heads=(8, 1), dim=128, page=64, dtype=BRAIN),
    Case(seq_lens=(33, 64), extend_lens=(33, 2), heads=(32, 8), dim=96, page=128, dtype=HALF),
    Case(seq_lens=(40,), extend_lens=(9,), heads=(8, 1), dim=256, page=4, soft_cap=3.0, window=16),
    Case(seq_lens=(90,), extend_lens=(65,), value_dim=112, page=2, dtype=BRAIN, window=20),
    Case(seq_lens=(60,), extend_lens=(12,), heads=(6, 2), page=32, window=1, sinks=True),
    Case(seq_lens=(20,), extend_lens=(5,), heads=(40, 1), page=8, soft_cap=2.0, sinks=True),
]


def decode(batch, module=decode_kernels, **options):
    return module.paged_decode(*batch.decode_arguments(), **batch.options, **options)


def extend(batch, module=extend_kernels, **options):
    return module.paged_extend(
        *batch.extend_arguments(),
        **batch.options,
        max_extend=max(batch.case.extend_lens) + 1,
        **options,
    )


def assert_agree(case, out, lse, twin_out, twin_lse):
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, twin_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, twin_lse, rtol=0, atol=tolerance)


def sums(batch):
    return torch.full(batch.q.shape[:2], -1.0, device=batch.q.device)


def test_kernels_run_where_the_tests_mean_them_to():
    """In the interpreter on a CPU, compiled on a GPU: anything else would test nothing."""
    kernel = decode_kernels.decode_kernel
    assert isinstance(kernel, triton.JITFunction) == torch.cuda.is_available()


@pytest.mark.parametrize(("case", "splits"), DECODE, ids=lambda value: getattr(value, "name", None))
def test_decode_agrees_with_its_twin(case, splits):
    batch = make(case)
    lse, twin_lse = sums(batch), sums(batch)
    out = decode(batch, splits=splits, lse=lse)
    assert_agree(case, out, lse, decode(batch, attention_twins, lse=twin_lse), twin_lse)


@pytest.mark.parametrize("case", EXTEND, ids=lambda case: case.name)
def test_extend_agrees_with_its_twin(case):
    batch = make(replace(case, padding=3))
    lse, twin_lse = sums(batch), sums(batch)
    out = extend(batch, lse=lse)
    assert_agree(case, out, lse, extend(batch, attention_twins, lse=twin_lse), twin_lse)


@pytest.mark.parametrize(
    "case",
    [
        Case(seq_lens=(5, 0, 37), sinks=True, window=20),
        Case(seq_lens=(5, 0, 37), extend_lens=(5, 0, 9), window=20, padding=4),
    ],
    ids=lambda case: case.name,
)
def test_unseen_slots_change_nothing(case):
    """NaN in page 0, tails of last pages, pages out of the window and padding queries."""
    batch = make(case)
    filled = replace(
        batch,
        q=batch.q.nan_to_num(7.0),
        k_cache=batch.k_cache.nan_to_num(3.0),
        v_cache=batch.v_cache.nan_to_num(3.0),
    )
    run = extend if case.extend_lens else lambda b: decode(b, splits=2)
    assert batch.v_cache.isnan().any()
    assert torch.equal(run(batch), run(filled))


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    """With a constant split count the order of additions depends on the row's length alone."""
    batch = make(Case(seq_lens=(70, 150, 3), page=16))
    alone = replace(
        batch,
        q=batch.q[1:2],
        page_table=batch.page_table[1:2],
        seq_lens=batch.seq_lens[1:2],
    )
    assert torch.equal(decode(batch, splits=3)[1:2], decode(alone, splits=3))


@pytest.mark.parametrize("window", [None, 20])
def test_a_query_has_the_same_bits_in_any_chunk(window):
    """Blocks lie at fixed positions and what is masked adds nothing, wherever a tile begins."""
    whole = make(Case(seq_lens=(70,), extend_lens=(70,), heads=(6, 2), window=window))
    chunk = replace(
        whole,
        q=whole.q[33:],
        extend_lens=torch.full_like(whole.extend_lens, 37),
        prefix_lens=torch.full_like(whole.prefix_lens, 33),
    )
    assert torch.equal(extend(whole)[33:], extend(chunk))


def test_settings_follow_the_model_and_the_device():
    choose, kib = extend_settings, 1024
    large = choose(row_bytes=512, element=2, shared_memory=227 * kib)
    assert (large.rows, large.block_bytes, large.warps) == (128, 64 * kib, 8)
    small = choose(row_bytes=512, element=2, shared_memory=99 * kib)
    assert (small.rows, small.block_bytes, small.warps) == (64, 32 * kib, 4)
    assert choose(row_bytes=1024, element=2, shared_memory=227 * kib) == small
    assert choose(row_bytes=256, element=2, shared_memory=227 * kib).block_bytes == 16 * kib
    assert choose(row_bytes=1024, element=4, shared_memory=227 * kib).rows == 32
    for row_bytes in (256, 512):
        model = {"row_bytes": row_bytes, "element": 2}
        whole = choose(**model, shared_memory=227 * kib, by_block=True)
        assert whole.by_block
        assert attention_math.block_keys(row_bytes, whole.block_bytes) == 64
        assert not choose(**model, shared_memory=99 * kib, by_block=True).by_block
    assert not choose(row_bytes=1024, element=2, shared_memory=227 * kib, by_block=True).by_block


@pytest.mark.parametrize(("window", "page"), [(None, 64), (20, 64), (70, 32)])
def test_large_tiles_agree_with_the_twin(window, page):
    """Blocks of 128 keys, which lie in 2 and 4 pages."""
    lens, new = (150, 40), (130, 3)
    case = Case(seq_lens=lens, extend_lens=new, heads=(3, 1), window=window, dtype=BRAIN, page=page)
    batch = make(case)
    lse, twin_lse = sums(batch), sums(batch)
    settings = ExtendSettings(rows=128, block_bytes=32 * 1024, warps=8)
    out = extend(batch, lse=lse, settings=settings)
    assert_agree(case, out, lse, extend(batch, attention_twins, lse=twin_lse), twin_lse)


BY_BLOCK = [
    Case(seq_lens=(200, 1, 0, 65), extend_lens=(200, 1, 0, 33), heads=(6, 2), page=64, sinks=True),
    Case(seq_lens=(150,), extend_lens=(90,), page=32, dtype=BRAIN, window=40, soft_cap=3.0),
    Case(seq_lens=(90, 40), extend_lens=(7, 40), heads=(4, 1), dim=128, value_dim=64, page=128),
]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("case", BY_BLOCK, ids=lambda case: case.name)
def test_whole_blocks_by_descriptors(case, heads_first):
    """Also of a pool whose pages hold head after head, which it shows as a view."""
    batch = make(replace(case, padding=3))
    if heads_first:
        k, v = (
            cache.transpose(1, 2).contiguous().transpose(1, 2)
            for cache in (batch.k_cache, batch.v_cache)
        )
        batch = replace(batch, k_cache=k, v_cache=v)
    settings = ExtendSettings(rows=32, block_bytes=16 * 1024, warps=4, stages=3, by_block=True)
    caches = batch.k_cache, batch.v_cache
    assert all(whole_blocks.takes_blocks(cache, 16) for cache in caches)
    lse, twin_lse = sums(batch), sums(batch)
    out = extend(batch, lse=lse, settings=settings)
    assert_agree(case, out, lse, extend(batch, attention_twins, lse=twin_lse), twin_lse)


def test_blocks_that_are_no_rectangles_come_row_by_row():
    """A block over several pages, a head size that is no power of two, rows at odd addresses."""
    pool = torch.zeros(4, 64, 2, 64)
    assert whole_blocks.takes_blocks(pool, 64)
    assert not whole_blocks.takes_blocks(pool, 128)
    assert not whole_blocks.takes_blocks(torch.zeros(4, 64, 2, 80), 64)
    assert not whole_blocks.takes_blocks(
        torch.zeros(4, 64, 131)[..., :128].unflatten(2, (2, 64)), 64
    )
    case = Case(seq_lens=(70,), extend_lens=(20,), dim=80, page=16)
    batch = make(case)
    settings = ExtendSettings(rows=32, block_bytes=16 * 1024, warps=4, by_block=True)
    lse, twin_lse = sums(batch), sums(batch)
    out = extend(batch, lse=lse, settings=settings)
    assert_agree(case, out, lse, extend(batch, attention_twins, lse=twin_lse), twin_lse)


def test_places_of_queries_that_do_not_exist_become_zero():
    """A row may be shorter on the device than the host believes; padding is left alone."""
    case = Case(seq_lens=(20, 70, 40), extend_lens=(20, 40, 9), heads=(6, 2), padding=4)
    batch, whole = make(case), extend(make(case))
    batch.extend_lens.copy_(torch.tensor([0, 17, 9]))
    out, lse = torch.full_like(batch.q, 42.0), sums(batch)
    settings = ExtendSettings(rows=32, block_bytes=16 * 1024, warps=4)
    extend(batch, out=out, lse=lse, covered=69, settings=settings)
    gone = torch.zeros(73, dtype=torch.bool)
    gone[:20] = gone[37:60] = True
    assert (out[gone] == 0).all()
    assert (lse[gone] == -math.inf).all()
    assert (out[69:] == 42.0).all()
    assert (lse[69:] == -1.0).all()
    torch.testing.assert_close(out[:69][~gone[:69]], whole[:69][~gone[:69]], rtol=1e-5, atol=1e-5)
    assert (extend(batch, covered=69, settings=settings)[69:] == 0).all()


def test_scratch_is_reused_whatever_it_holds():
    batch = make(Case(seq_lens=(70, 1, 0), page=16))
    scratch = DecodeScratch.allocate(
        batch=4, heads=4, splits=8, value_dim=64, device=batch.q.device
    )
    scratch.values.fill_(math.nan)
    scratch.lse.fill_(math.nan)
    once = decode(batch, splits=4, scratch=scratch)
    torch.testing.assert_close(once, decode(batch, splits=1), rtol=0, atol=1e-6)
    assert torch.equal(once, decode(batch, splits=4, scratch=scratch))
    assert torch.equal(decode(batch, splits=2), decode(batch, splits=2, scratch=scratch))
    small = DecodeScratch.allocate(batch=1, heads=4, splits=4, value_dim=64, device=batch.q.device)
    with pytest.raises(AssertionError):
        decode(batch, splits=4, scratch=small)


@pytest.mark.parametrize("group", [1, 3, 32])
def test_splits_are_combined_block_by_block(group):
    """More splits than the combine kernel reads at once, and fewer: both are the softmax."""
    kv_heads = 2 if group == 3 else 1
    case = Case(seq_lens=(640,), heads=(group * kv_heads, kv_heads), dim=64, sinks=True)
    batch = make(case)
    lse, twin_lse = sums(batch), sums(batch)
    out = decode(batch, splits=2 * decode_kernels.COMBINE_BLOCK if group == 32 else 10, lse=lse)
    assert_agree(case, out, lse, decode(batch, attention_twins, lse=twin_lse), twin_lse)


def test_query_may_be_a_view_and_outputs_may_be_given():
    case = Case(seq_lens=(20, 9), heads=(6, 2), padding=1, extend_lens=(4, 9))
    batch = make(case)
    fused = torch.full((14, 10, 64), math.nan, device=batch.q.device)  # q, k and v side by side
    fused[:, :6] = batch.q
    view = replace(batch, q=fused[:, :6])
    out = torch.full_like(batch.q, 42.0)
    assert extend(view, out=out) is out
    assert (out[13:] == 42).all()
    assert torch.equal(out[:13], extend(batch)[:13])
    assert (extend(batch)[13:] == 0).all()


def test_caches_may_be_layers_of_one_tensor():
    batch = make(Case(seq_lens=(20, 9)))
    both = torch.full((*batch.k_cache.shape[:2], 2, 4, 64), math.nan, device=batch.q.device)
    both[:, :, 0], both[:, :, 1] = batch.k_cache, batch.v_cache
    view = replace(batch, k_cache=both[:, :, 0], v_cache=both[:, :, 1])
    assert torch.equal(decode(view), decode(batch))


def test_no_tokens_are_legal():
    batch = make(Case(seq_lens=(4,), extend_lens=(0,)))
    assert extend(batch).shape == (0, 4, 64)
    none = replace(
        batch, q=batch.q[:0], page_table=batch.page_table[:0], seq_lens=batch.seq_lens[:0]
    )
    assert decode(none).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(seq_lens=(2,), dim=320), "head sizes 320"),
        (Case(seq_lens=(2,), value_dim=512), "and 512"),
        (Case(seq_lens=(2,), page=12), "page size 12"),
        (Case(seq_lens=(2,), page=256), "page size 256"),
        (Case(seq_lens=(2,), dtype=torch.float64), "float64"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(case, words):
    with pytest.raises(UnsupportedError, match=words):
        decode(make(case))
    extending = make(replace(case, extend_lens=(1,)))
    with pytest.raises(UnsupportedError, match=words):
        extend(extending)


def test_compiled_triton_on_the_cpu_is_refused(monkeypatch):
    batch = make(Case(seq_lens=(2,)), device=torch.device("cpu"))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        decode(batch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a Hopper GPU takes it")
def test_dependent_launch_is_refused_where_there_is_none():
    with pytest.raises(UnsupportedError, match="pdl=False"):
        extend(make(Case(seq_lens=(2,), extend_lens=(1,))), pdl=True)


def test_support_is_told_per_device(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert support_triton.triton_available() is None
    assert support_triton.triton_available("cpu") is None
    assert "unset TRITON_INTERPRET" in str(support_triton.triton_available("cuda"))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert support_triton.triton_available("cuda") is None
    assert "interpreter" in str(support_triton.triton_available("cpu"))
