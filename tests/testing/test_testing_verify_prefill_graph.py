"""verify runs the prefill graphs too, here with a recorder that needs no GPU."""

import sys
from pathlib import Path

import pytest
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.config.engine_config import EngineConfig
from headrace.execution.prefill_graph import PrefillInputs
from headrace.testing.verify import verify
from headrace.testing.verify_report import VerifyReport

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from operator_recorder import as_if_on_a_gpu

PROMPTS = [[(7 * place + 31 * length) % 250 for place in range(length)] for length in (40, 33, 3)]


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )


def run(model: str, **options: object) -> VerifyReport:
    settings = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "cpu_graph": "off"}
    fixed = {
        "attention_backend": "torch_native",
        "page_size": 16,
        "chunked_prefill_size": 29,
        "enable_prefix_cache": False,
        "enable_overlap": True,
    }
    config = EngineConfig(model=model, seed=3, **(settings | fixed | options))
    return verify(config, prompts=PROMPTS, deep=True)


def test_both_kinds_agree_with_eager(model: str) -> None:
    report = run(model)
    assert report.passed, str(report)
    paths = {each.configuration.path: set(each.paths) for each in report.results}
    assert paths["eager"] == {"eager"}
    for kind in ("prefill_graph", "prefill_graph (piecewise)"):
        assert paths[kind] == {"prefill_graph", "eager"}


def test_a_graph_that_reads_stale_slots_is_found(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = PrefillInputs.fill

    def forget(inputs: PrefillInputs, batch: ForwardBatch, padded: int) -> None:
        slots: Tensor = inputs._numbers[2:].clone()
        fill(inputs, batch, padded)
        inputs._numbers[2:] = slots

    monkeypatch.setattr(PrefillInputs, "fill", forget)
    report = run(model, prefill_graph="breakable")
    assert {each.configuration.path for each in report.failed} == {"prefill_graph"}
    found = report.failed[0].deep
    assert found is not None
    assert "extend, prefill_graph, " in found.step
    assert (found.what, found.layer, found.position) == ("K and V", 0, 0)
    assert report.common == "path prefill_graph"
