"""Decode with other settings, page layouts and ways to launch than the default."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, Case, make

from headrace.base.errors import UnsupportedError
from headrace.kernels import attention_twins
from headrace.kernels.decode_attention_settings import SHALLOW

pytest.importorskip("triton", reason="the kernels need the triton package")
kernels = pytest.importorskip("headrace.kernels.decode_attention_triton")

CASES = [
    Case(seq_lens=(200, 1, 0, 65), heads=(6, 2), page=64, sinks=True),
    Case(seq_lens=(150, 33), page=128, window=40, soft_cap=3.0),
    Case(seq_lens=(90, 140), heads=(4, 1), value_dim=128, page=16, window=50),
    Case(seq_lens=(70, 0), heads=(4, 2), dim=48, page=1),
]


def both(batch, **options):
    """Output and lse of the kernel and of the twin."""
    results = []
    for module, named in ((kernels, options), (attention_twins, {})):
        lse = torch.zeros(batch.q.shape[:2], device=batch.q.device)
        out = module.paged_decode(*batch.decode_arguments(), **batch.options, **named, lse=lse)
        results.append((out, lse))
    return results


@pytest.mark.parametrize(("block_bytes", "splits"), [(8 * 1024, 1), (128 * 1024, 2)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_shorter_and_longer_than_pages(case, block_bytes, splits):
    settings = replace(SHALLOW, block_bytes=block_bytes)
    for found, expected in zip(*both(make(case), splits=splits, settings=settings), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [1, 100])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_row_is_cut_by_its_own_length(case, share):
    """From as many runs as allowed to one, which needs no second kernel."""
    keys = torch.tensor([share], dtype=torch.int32, device=DEVICE)
    for found, expected in zip(*both(make(case), splits=6, share=keys), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pages_that_hold_head_after_head_give_the_same_bits(case):
    batch = make(case)
    k, v = (
        cache.transpose(1, 2).contiguous().transpose(1, 2)
        for cache in (batch.k_cache, batch.v_cache)
    )
    ours = both(batch, splits=2)[0]
    theirs = both(replace(batch, k_cache=k, v_cache=v), splits=2)[0]
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a Hopper GPU takes it")
def test_dependent_launch_is_refused_where_there_is_none():
    with pytest.raises(UnsupportedError, match="pdl=False"):
        both(make(Case(seq_lens=(2,))), pdl=True, tables_ready=True)
