"""What is measured of the prefill graphs is prompts on each of the ways."""

import sys
from pathlib import Path

import pytest

from headrace import LLM
from headrace.bench import prefill_graph

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from operator_recorder import as_if_on_a_gpu


def test_every_way_is_timed_on_its_path(dummy_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )
    options = {"load_format": "dummy", "device": "cpu", "enable_prefix_cache": False}
    with LLM(dummy_model, prefill_graph="off", **options) as llm:
        before = llm.engine.worker.runner.selector.paths
        short, long = prefill_graph.measure(llm, (7, 33), repeats=3)
        assert llm.engine.worker.runner.selector.paths == before
    assert (short.length, long.length) == (7, 33)
    for found in (short, long):
        assert [len(each) for each in found.seconds.values()] == [3, 3, 3]
        assert found.taken == {
            "off": {"eager": 3},
            "breakable": {"prefill_graph": 3},
            "piecewise": {"prefill_graph": 3},
        }
        assert "ran" not in str(found)
    with LLM(dummy_model, prefill_graph="off", **options) as llm:
        (alone,) = prefill_graph.measure(llm, (1,), ["off", "breakable"], repeats=1)
    assert "breakable ran eager 1 times" in str(alone)


def test_a_device_without_graphs_is_refused(
    dummy_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefill_graph, "shape_path", lambda name: Path(dummy_model))
    assert prefill_graph.main(["tiny", "--lengths", "8"]) == 2
    assert "CUDA graphs need a CUDA device" in capsys.readouterr().err
    assert prefill_graph.main(["tiny", "--ways", "all"]) == 2
    assert "Unknown ways: all" in capsys.readouterr().err
