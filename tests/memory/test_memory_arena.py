"""The arena counts what is alive, by tag, and says what was asked when memory is short."""

from pathlib import Path

import pytest
import torch

from headrace.base.errors import CapacityError
from headrace.memory import arena as arena_module
from headrace.memory.arena import Arena
from headrace.memory.free_memory import free_bytes
from headrace.memory.host_memory import available_container_bytes, available_host_bytes


def test_allocates_on_its_device_and_zeroes() -> None:
    tensor = Arena("cpu").allocate("kv", (3, 4), torch.int32)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((3, 4), torch.int32, "cpu")
    assert not tensor.any()
    assert Arena("cpu").allocate("kv", [2], torch.float16, zero=False).shape == (2,)


def test_counts_bytes_by_tag() -> None:
    arena = Arena("cpu")
    kept = [
        arena.allocate("kv", (10, 8), torch.float32),
        arena.allocate("kv", (4,), torch.bfloat16),
        arena.allocate("rows", (5,), torch.int64),
    ]
    assert (arena.bytes("kv"), arena.bytes("rows"), arena.bytes("graphs")) == (328, 40, 0)
    assert arena.bytes() == 368
    assert arena.bytes_by_tag() == {"kv": 328, "rows": 40}
    assert len(kept) == 3


def test_memory_counts_until_its_last_user_is_gone() -> None:
    arena = Arena("cpu")
    tensor = arena.allocate("weights", (8,), torch.float32)
    parameter = torch.nn.Parameter(tensor[2:], requires_grad=False)
    del tensor
    assert arena.bytes("weights") == 32
    del parameter
    assert arena.bytes("weights") == 0
    assert arena.bytes_by_tag() == {}


def test_asking_for_more_than_there_is_names_tag_and_bytes() -> None:
    arena = Arena("cpu")
    kept = arena.allocate("weights", (2**18,), torch.float32)
    with pytest.raises(CapacityError) as caught:
        arena.allocate("kv", (2**50,), torch.float32)
    message = str(caught.value)
    assert "'kv'" in message
    assert f"{2**52:,} bytes" in message
    assert "bytes free" in message
    assert "weights 0.00 GiB" in message
    assert arena.bytes("kv") == 0
    assert kept.numel() == 2**18


def test_the_allocators_own_refusal_is_told_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "free_bytes", lambda device: None)
    with pytest.raises(CapacityError, match="an unknown number of bytes free"):
        Arena("cpu").allocate("kv", (2**50,), torch.float32)


def test_a_host_that_would_promise_too_much_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "free_bytes", lambda device: arena_module.LARGE - 1)
    with pytest.raises(CapacityError, match="67,108,863 bytes free"):
        Arena("cpu").allocate("kv", (arena_module.LARGE,), torch.int8)


def test_a_device_out_of_memory_is_told_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(CapacityError, match="'graphs': 4 bytes"):
        Arena("cpu").allocate("graphs", (1,), torch.float32)


def test_other_failures_pass_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Arena("cpu").allocate("kv", (1,), torch.float32)


def test_host_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_host_bytes(meminfo) is None
    meminfo.write_text("MemTotal:       64 kB\nMemFree:  1 kB\nMemAvailable:   32 kB\nHuge: 0\n")
    assert available_host_bytes(meminfo) == 32 * 1024


def test_a_container_limit_counts_page_cache_as_free(tmp_path: Path) -> None:
    assert available_container_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert available_container_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 400\nshmem 100\n")
    assert available_container_bytes(tmp_path) == 400


def test_free_bytes_of_an_unknown_device_is_unknown() -> None:
    assert free_bytes(torch.device("meta")) is None
