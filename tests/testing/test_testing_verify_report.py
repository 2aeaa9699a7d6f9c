"""What verify tells: table, plain data, page; own prompts; bounds that follow plain eager."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.base.decision import Refusal
from headrace.base.errors import RequestError
from headrace.config.engine_config import EngineConfig
from headrace.execution.preparation import BatchPreparation
from headrace.layers.operators import TorchOperators
from headrace.testing.calibration import PlainError, calibrated
from headrace.testing.combinations import PATHS
from headrace.testing.comparison import HALF, Tolerance, divergence, place_error
from headrace.testing.verify import verify
from headrace.testing.verify_page import page_of
from headrace.testing.verify_report import VerifyReport
from headrace.testing.verify_table import render
from headrace.testing.workload import OwnPrompt

NARROW = {"chunked_prefill_size": 64, "enable_prefix_cache": False, "enable_overlap": False}
IDS = [[(7 * place + 31 * index) % 250 for place in range(40 - index)] for index in range(3)]


def run(model: str, prompts: Any = IDS, *, deep: bool = False, **options: Any) -> VerifyReport:
    settings = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "cpu_graph": "off",
        "seed": 3,
    }
    config = EngineConfig(model=model, **(settings | NARROW | options))
    return verify(config, prompts=prompts, deep=deep)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of decode steps are off in pages of 64; and a value that is no number."""
    original = BatchPreparation.fill

    def fill(self: BatchPreparation, batch: Any) -> None:
        original(self, batch)
        if self._page_size == 64 and batch.mode.is_decode:
            batch.positions = batch.positions + 1

    monkeypatch.setattr(BatchPreparation, "fill", fill)


@pytest.fixture(scope="module")
def failing(model: str) -> VerifyReport:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return run(model, deep=True)


def test_plain_data_is_json_that_every_reader_takes(failing: VerifyReport) -> None:
    data = json.loads(json.dumps(failing.as_dict(), allow_nan=False))
    assert not data["passed"]
    assert data["common"] == "page size 64"
    assert data["waves"] == {"greedy": 3, "sampled": 3}
    assert {"headrace", "torch", "device", "threads"} <= set(data["environment"])
    for result in data["results"]:
        assert len(result["sequences"]) == 6
        assert (
            sum(len(each["differences"]) for each in result["sequences"]) == result["places"] > 40
        )
        wrong = result["configuration"]["page_size"] == 64
        assert bool(result["problems"]) == bool(result["deep"]) == wrong
        assert (result["top_agreement"] < 1.0 or result["mean_divergence"] > 1e-6) == wrong
    (deep, *_) = [result["deep"] for result in data["results"] if result["deep"]]
    assert (deep["layer"], deep["position"], deep["what"]) == (0, 41, "K")
    assert len(deep["layers"]["keys"]) == 3


def test_the_page_is_complete_in_itself(failing: VerifyReport) -> None:
    page = page_of(failing)
    assert not re.search(r"<script|<link|https?://|url\(|src=", page)
    assert page.count("<svg") == page.count("</svg>") == 2 + len(failing.failed)
    assert page.count('<b class="bad">FAILED</b>') == len(failing.failed)
    assert page.count('<b class="good">ok</b>') == len(failing.results) - len(failing.failed)
    assert "What fails has <b>page size 64</b>" in page
    assert "K of layer 0, position 41" in page
    for reason in failing.refusals_by_reason():
        assert reason.split(" (")[0] in page
    cells = sum(len(each.differences) for each in failing.results[0].sequences)
    assert page.count("<title>") == 1 + cells * len(failing.results)


def test_the_page_of_what_passes_and_names_are_escaped(model: str) -> None:
    report = run(model, page_size=16)
    page = page_of(report)
    assert "Passed" in page
    assert "What failed" not in page
    broken = VerifyReport(
        **{name: getattr(report, name) for name in report.__slots__} | {"model": "<script>"}
    )
    assert "<script" not in page_of(broken)


def test_what_is_not_a_number_is_told_and_drawn(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TorchOperators.logits

    def logits(self: Any, head: Any, hidden: Tensor) -> Tensor:
        out = original(self, head, hidden)
        return out.index_fill(1, out.new_tensor([3]).long(), math.nan) if len(out) > 1 else out

    monkeypatch.setattr(TorchOperators, "logits", logits)
    report = run(model, page_size=16)
    assert not report.passed
    json.dumps(report.as_dict(), allow_nan=False)
    assert "FAILED" in page_of(report)


def test_the_first_other_token_comes_with_its_context(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = run(model, page_size=64)
    found = [result.first_other for result in report.results if result.first_other]
    assert found
    sequence, other = found[0]
    assert other.token != other.expected
    assert not other.excused
    assert other.context[: 12 - other.place] == tuple(IDS[sequence.index][-12 + other.place :])
    assert f"{sequence.name}, token {other.place}" in str(report)


def test_own_prompts_bring_their_lengths(model: str) -> None:
    own = [OwnPrompt(prompt=IDS[0], max_tokens=3), OwnPrompt(prompt=IDS[1][:5])]
    report = run(model, own, page_size=16)
    assert report.passed
    counts = [len(each.differences) for each in report.results[0].sequences]
    assert counts == [3, 9, 3, 9]
    with pytest.raises(RequestError, match="tokenizer"):
        run(model, [OwnPrompt(messages=[{"role": "user", "content": "hi"}])])


def test_bounds_of_half_precision_follow_plain_eager(model: str) -> None:
    report = run(model, dtype="bfloat16", page_size=16)
    assert report.passed, str(report)
    assert report.plain is not None
    assert 1e-3 < report.plain.logprob < 0.1
    assert report.tolerance.logprob < HALF["bfloat16"].logprob / 5
    assert report.tolerance.divergence < HALF["bfloat16"].divergence / 5
    assert "Plain bfloat16 eager is off by" in str(report)
    assert "plain bfloat16 eager" in page_of(report)
    assert run(model, page_size=16).plain is None


def test_a_fault_that_plain_eager_shares_is_found_all_the_same(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TorchOperators.norm

    def norm(self: Any, layer: Any, x: Tensor) -> Tensor:
        if x.dtype.itemsize == 4:
            return original(self, layer, x)
        return F.rms_norm(x.float(), layer.shape, None, layer.eps).to(x.dtype) * 0.7

    monkeypatch.setattr(TorchOperators, "norm", norm)
    report = run(model, dtype="bfloat16", page_size=16)
    assert report.plain is not None
    assert report.plain.divergence > HALF["bfloat16"].divergence
    assert report.tolerance.divergence == HALF["bfloat16"].divergence
    assert len(report.failed) == len(report.results)


def test_calibrated_bounds() -> None:
    loose = Tolerance(logprob=2.0, divergence=0.02, excused=0.25)
    small = calibrated(loose, PlainError(logprob=0.1, divergence=1e-4, other_tokens=0.0), "float16")
    assert small.logprob == pytest.approx(0.204)
    assert small.divergence == pytest.approx(3.01e-4)
    assert small.excused == pytest.approx(0.01)
    nothing = PlainError(logprob=math.nan, divergence=math.nan, other_tokens=1.0)
    assert calibrated(loose, nothing, "bfloat16") == loose


def test_errors_of_a_place() -> None:
    theirs = torch.tensor([0.5, 0.3, 0.2]).log()
    same = place_error({0: math.log(0.5), 1: math.log(0.3)}, theirs)
    assert same.difference < 1e-6
    assert abs(same.divergence) < 1e-6
    assert same.top_agrees
    other = place_error({0: math.log(0.3), 1: math.log(0.5)}, theirs)
    assert other.difference == pytest.approx(math.log(5 / 3), rel=1e-5)
    assert not other.top_agrees
    expected = 0.5 * math.log(5 / 3) + 0.3 * math.log(3 / 5)
    assert other.divergence == pytest.approx(expected, rel=1e-5)
    assert math.isnan(divergence({0: math.nan}, {0: -1.0}))


@pytest.mark.parametrize(("width", "has_all"), [(64, False), (80, True)])
def test_the_table_fits_its_terminal(failing: VerifyReport, width: int, has_all: bool) -> None:
    lines = render(failing, width).splitlines()
    assert max(map(len, lines)) <= width
    (head,) = [line for line in lines if line.startswith("verdict")]
    assert "|dlogprob|" in head
    assert ("steps by path" in head) == has_all
    rows = [line for line in lines if line.startswith(("ok  ", "FAILED  "))]
    assert len(rows) == len(failing.results)
    assert len({line.index(" ") for line in rows}) == 2


def test_what_all_configurations_share_is_said_once(failing: VerifyReport) -> None:
    shown = render(failing)
    (shared,) = [line for line in shown.splitlines() if line.startswith("All: ")]
    assert "attention torch_native" in shared
    (head,) = [line for line in shown.splitlines() if line.startswith("verdict")]
    assert "attention" not in head


def test_backends_that_are_refused_together_are_told_together(failing: VerifyReport) -> None:
    report = replace(
        failing,
        refused=[
            Refusal(subject=f"{path} / {backend}", reason="no device")
            for backend in ("fa3", "cudnn")
            for path in PATHS
        ]
        + [Refusal(subject="cpu_graph", reason="was asked to be off", remedy="Ask for it")],
    )
    assert report.refusals_by_reason() == {
        "no device": ["fa3, cudnn on every path"],
        "was asked to be off (Ask for it)": ["cpu_graph"],
    }
