"""Which machine this is."""

from pathlib import Path

import pytest
import torch

from headrace.base.errors import ConfigError, UnsupportedError
from headrace.config.hardware import GIB
from headrace.memory.host_memory import total_host_bytes
from headrace.runner.detect import detect, kernel_packages, known_gpu


def test_cpu() -> None:
    hardware = detect("cpu")
    assert hardware.platform == "cpu"
    assert hardware.memory_bytes > GIB // 4
    assert hardware.units >= 1
    assert not hardware.assumed


def test_auto_takes_cuda_only_when_it_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect("auto").platform == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device is usable") as caught:
        detect("cuda")
    assert caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["mps", "xpu", "npu", "rocm", "cuda:1", "tpu", ""])
def test_other_devices_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        detect(name)
    assert repr(name) in str(caught.value)
    assert "cuda" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA L4", 22.0, "l4-24gb"),
        ("NVIDIA L40S", 44.4, "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090-24gb"),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
        ("NVIDIA H100 PCIe MIG 1g.10gb", 10.0, None),
    ],
)
def test_data_sheet_of_a_device_name(name: str, gib: float, found: str | None) -> None:
    sheet = known_gpu(name, int(gib * GIB))
    assert (sheet and sheet.name) == found


def test_memory_is_that_of_the_container_when_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:        8000 kB\nMemFree:  1 kB\n")
    assert total_host_bytes(meminfo, tmp_path) == 8_192_000
    (tmp_path / "memory.max").write_text("max\n")
    assert total_host_bytes(meminfo, tmp_path) == 8_192_000
    (tmp_path / "memory.max").write_text("4096000\n")
    assert total_host_bytes(meminfo, tmp_path) == 4_096_000
    (tmp_path / "memory.max").write_text("9000000000\n")
    assert total_host_bytes(meminfo, tmp_path) == 8_192_000


def test_memory_without_proc(tmp_path: Path) -> None:
    assert total_host_bytes(tmp_path / "none", tmp_path) > GIB // 4


def test_kernel_packages_are_found_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runner.detect.find_spec", lambda name: None)
    assert kernel_packages() == frozenset()
    monkeypatch.setattr("headrace.runner.detect.find_spec", lambda name: object())
    assert kernel_packages() == {"triton", "flashinfer", "sgl_kernel"}
