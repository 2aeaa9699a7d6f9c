"""Slots of the KV pool: layout, casting, padding."""

import pytest
import torch

from headrace.base.errors import UnsupportedError
from headrace.batch.protocols import KvPool
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool


def make_pool(arena: Arena, dtype: torch.dtype = torch.float32) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        arena,
        num_layers=2,
        num_pages=3,
        page_size=4,
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=6,
        dtype=dtype,
    )
    for layer in range(2):
        for part in pool.key_value(layer):
            part.zero_()  # a new pool holds whatever the memory held
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slot_is_its_place_in_its_page(dtype: torch.dtype) -> None:
    pool: KvPool = make_pool(Arena("cpu"), dtype)
    fused = torch.randn(3, 2, 20)
    key, value = fused[..., :8], fused[..., 8:14]  # views, as a fused projection gives them
    pool.write(1, torch.tensor([4, 11, 6]), key, value)
    k, v = pool.key_value(1)
    assert (k.shape, v.shape, k.dtype) == ((3, 4, 2, 8), (3, 4, 2, 6), dtype)
    for token, (page, place) in enumerate([(1, 0), (2, 3), (1, 2)]):
        assert torch.equal(k[page, place], key[token].to(dtype))
        assert torch.equal(v[page, place], value[token].to(dtype))
    assert k.count_nonzero() == 3 * 2 * 8
    assert v.count_nonzero() == 3 * 2 * 6
    assert not pool.key_value(0)[0].any()


def test_padding_may_write_slot_0_many_times() -> None:
    pool = make_pool(Arena("cpu"))
    key, value = torch.full((3, 2, 8), torch.nan), torch.full((3, 2, 6), torch.nan)
    key[1], value[1] = 1, 2
    pool.write(0, torch.tensor([0, 5, 0]), key, value)
    k, v = pool.key_value(0)
    assert k[0, 0].isnan().all()
    assert v[0, 0].isnan().all()
    k[0, 0], v[0, 0] = 0, 0
    assert (k.sum(), v.sum()) == (16, 24)


def test_no_token_is_no_write() -> None:
    pool = make_pool(Arena("cpu"))
    pool.write(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, 8), torch.empty(0, 2, 6))
    assert not pool.key_value(0)[0].any()


def test_nothing_but_keys_and_values_takes_memory() -> None:
    arena = Arena("cpu")
    pool = make_pool(arena, torch.bfloat16)
    per_token = 2 * 2 * (8 + 6) * 2  # layers, heads, dimensions, bytes
    assert arena.bytes("kv") == per_token * pool.num_pages * pool.page_size


def test_addresses_are_those_of_one_tensor_for_good() -> None:
    pool = make_pool(Arena("cpu"))
    assert pool.key_value(1)[0].data_ptr() == pool.key_value(1)[0].data_ptr()
    assert pool.key_value(1)[0].is_contiguous()


def test_a_dtype_that_needs_scales_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float8_e4m3fn") as caught:
        make_pool(Arena("cpu"), torch.float8_e4m3fn)
    assert "torch.bfloat16" in caught.value.remedy
