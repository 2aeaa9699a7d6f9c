"""Fresh processes: cold and warm, where their time goes, and what they say when they fail."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.env import child_environment
from headrace.base.errors import HeadraceError
from headrace.bench.first_token import capture_all
from headrace.bench.startup import Start, measure_starts, table


def test_a_cold_and_a_warm_start(dummy_model: str) -> None:
    options = {"model": dummy_model, "load_format": "dummy", "device": "cpu"}
    cold, warm = measure_starts(options, input_len=5, repeats=1, graphs=True)
    assert (cold.cache, warm.cache) == ("cold", "warm")
    for start in (cold, warm):
        assert list(start.phases) == ["import", "load and assemble", "first token"]
        assert 0 < sum(start.phases.values()) < start.first_token
        assert "weights" in [name for name, _, _ in start.parts]
        assert (start.captured, start.graphs) == (None, None)  # nothing is captured on a CPU
        assert (start.dtype, start.as_dict()["kind"]) == ("float32", "startup")


def test_a_process_that_fails_is_told(dummy_model: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"model": dummy_model, "device": "cpu"}  # there are no weights
    with pytest.raises(HeadraceError, match="ended with status 2"):
        list(measure_starts(options, input_len=5, repeats=1, graphs=False))
    assert dummy_model in capfd.readouterr().err


def test_a_child_gets_our_environment_and_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("CHANGED", "1")
    made = child_environment({"CHANGED": "2"})
    assert (made["KEPT"], made["CHANGED"]) == ("1", "2")


def test_graphs_are_captured_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: captured.append("waited"))
    decode, prefill = (
        SimpleNamespace(prepare=lambda seconds=seconds: SimpleNamespace(seconds=seconds))
        for seconds in ({1: 0.5, 2: 0.25}, {4: 0.3})
    )
    paths: Any = SimpleNamespace(
        capture_all=lambda: captured.append("all"), decode_graph=decode, prefill_graph=prefill
    )
    assert capture_all(paths) == 3
    assert captured == ["all", "waited"]
    paths.prefill_graph = None
    assert capture_all(paths) == 2
    paths.decode_graph = None
    assert capture_all(paths) is None


def test_table() -> None:
    cold = Start(
        model="tiny",
        cache="cold",
        hardware="GPU",
        dtype="bfloat16",
        first_token=20.0,
        phases={"import": 4.0, "load and assemble": 9.0, "first token": 5.0},
        parts=(("weights", 6.0, 1000),),
        kernels="measured: 41 compiled",
        captured=55.5,
        graphs=35,
    )
    lines = table([cold]).splitlines()
    assert lines[1].split() == ["cold", "20.00", "55.50", "35"]
    assert lines[2] == "seconds of a cold start"
    assert [line.strip() for line in lines[3:]] == [
        f"{'interpreter':<24}    2.00",
        f"{'import':<24}    4.00",
        f"{'load and assemble':<24}    9.00",
        f"{'weights':<22}    6.00",
        "kernels: measured: 41 compiled",
        f"{'first token':<24}    5.00",
    ]
