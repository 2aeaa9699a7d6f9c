"""Deterministic mode: random workloads give every request the bits that it has alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention import selection
from headrace.attention.torch_native import TorchNativeBackend
from headrace.config.engine_config import EngineConfig
from headrace.kernels.row_blocks import BLOCK_ROWS
from headrace.layers.cpu_operators import CpuOperators
from headrace.layers.deterministic_operators import DeterministicCpuOperators
from headrace.layers.row_blocks import RowBlockFormat
from headrace.layers.weight_formats import DENSE, DenseFormat
from headrace.testing import bits as bits_module
from headrace.testing.bits import BitsReport, check_bits
from headrace.testing.tiny_models import TINY_MODELS, write_tiny_model
from headrace.testing.verify import verify

DTYPES = ("float32", "bfloat16")


def bits(
    folder: Path, family: str, *, workloads: int, each: int = 2, seed: int = 0, **options: Any
) -> BitsReport:
    settings = {"device": "cpu", "load_format": "dummy", "seed": 3, "deterministic": True}
    config = EngineConfig(model=str(write_tiny_model(folder, family)), **(settings | options))
    return check_bits(config, workloads=workloads, each=each, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "seed"), [("qwen2", 11), ("gemma3", 9)])
def test_a_request_has_the_bits_that_it_has_alone(
    tmp_path: Path, family: str, seed: int, dtype: str
) -> None:
    report = bits(tmp_path, family, workloads=4, each=1, seed=seed, dtype=dtype)
    assert not report.differences, str(report)
    assert report.requests > 15
    assert report.tokens > 80
    assert report.cached_tokens > 50
    assert report.retractions > 1
    assert family != "qwen2" or "split_prefill" in report.paths


def test_verify_holds_deterministic_configurations_to_the_bits_of_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = EngineConfig(
        model=str(write_tiny_model(tmp_path, "llama")),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        deterministic=True,
        attention_backend="torch_native",
        page_size=16,
        chunked_prefill_size=29,
        enable_overlap=False,
        enable_prefix_cache=False,
    )
    prompts = [list(range(9, 9 + length)) for length in (5, 40, 17)]
    report = verify(asked, prompts=prompts)
    assert report.passed, str(report)
    assert "the same bits as alone" in str(report)
    norm_by_a_dot_product(monkeypatch)
    planted = verify(asked, prompts=prompts)
    assert not planted.passed
    assert any("alone" in problem for result in planted.failed for problem in result.problems)
    assert max(result.max_difference for result in planted.results) < 1e-4  # no tolerance finds it


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", TINY_MODELS)
def test_two_hundred_workloads(tmp_path: Path, family: str, dtype: str) -> None:
    report = bits(tmp_path, family, workloads=200 // len(TINY_MODELS), seed=7, dtype=dtype)
    assert not report.differences, str(report)


@pytest.mark.slow
def test_two_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        report = bits(tmp_path, "llama", workloads=20, seed=9)
    finally:
        torch.set_num_threads(before)
    assert not report.differences, str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_a_gpu(tmp_path: Path, family: str) -> None:
    report = bits(tmp_path, family, workloads=12, each=3, seed=11, device="cuda", dtype="bfloat16")
    assert not report.differences, str(report)
    assert {"eager", "decode_graph", "prefill_graph"} <= set(report.paths)
    assert report.cached_tokens > 100
    assert report.retractions > 2


# ---- planted faults are found


def test_the_default_operators_follow_the_batch(tmp_path: Path) -> None:
    report = bits(tmp_path, "llama", workloads=2, deterministic=False)
    assert len(report.differences) > report.requests / 2


def norm_by_a_dot_product(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DeterministicCpuOperators, "norm", lambda self, norm, x: CpuOperators().norm(norm, x)
    )


def products_of_any_number_of_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("headrace.runner.model_runner.WEIGHT_FORMATS", {"onednn": DENSE, "dense": DENSE})
    patch.setattr(RowBlockFormat, "apply", lambda self, *given: DENSE.apply(*given))


def attention_cut_by_the_longest_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(selection, "_classes", lambda name, need: (TorchNativeBackend,))
    patch.setattr(TorchNativeBackend, "refusals", classmethod(lambda backend, need, hardware: []))
    patch.setattr(selection, "need_refusals", lambda name, capabilities, need: [])


@pytest.mark.parametrize(
    "plant",
    [norm_by_a_dot_product, products_of_any_number_of_rows, attention_cut_by_the_longest_row],
)
def test_one_operator_that_follows_the_batch_is_found(
    tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = bits(tmp_path, "llama", workloads=4, dtype="float32")
    assert report.differences
    assert all("alone" in each for each in report.differences)


class AloneInAnotherOrder(DenseFormat):
    """Adds up the products of a row alone otherwise than those of a row among others."""

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None
    ) -> Tensor:
        if len(x) > 1:
            return super().apply(x, weight, bias, addend)
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)


def test_an_order_of_sums_that_bfloat16_mostly_hides_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = dict.fromkeys(("onednn", "dense"), AloneInAnotherOrder())
    monkeypatch.setattr("headrace.runner.model_runner.WEIGHT_FORMATS", forms)
    monkeypatch.setattr(RowBlockFormat, "_proven", lambda self, shape: BLOCK_ROWS)
    report = bits(tmp_path, "qwen2", workloads=2, dtype="bfloat16")
    assert report.differences


def test_the_command_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--workloads", "1", "--device", "cpu", "--family", "llama", "--dtype", "float32"]
    assert bits_module.main(few) == 0
    assert "0 differ from alone" in capsys.readouterr().out
    assert bits_module.main([*few, "--default"]) == 1
    assert "logprob" in capsys.readouterr().out
