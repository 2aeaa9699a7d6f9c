"""When decode steps on a CPU are compiled: asked, measured, or refused with the reason."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_cases import CPU, CPU_WITH_COMPILER, H100, LLAMA, QWEN3, QWEN3_MOE, persona

from headrace.base.decision import Decision
from headrace.base.errors import ConfigError, UnsupportedError
from headrace.config.engine_config import EngineConfig
from headrace.runner import cpu_graph_gains as kept
from headrace.runner.cpu_graph_gains import CpuGraphGain
from headrace.runner.resolve import CheckpointFacts, resolve

GAIN = CpuGraphGain(
    cpu=CPU.name,
    torch=torch.__version__,
    threads=torch.get_num_threads(),
    shape=kept.shape_of(persona().traits),
    dtype="float32",
    rows={"1": [30.0, 27.0], "8": [60.0, 50.0]},
    day="2026-11-29",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path


def decide(
    *gains: CpuGraphGain, asked: str = "auto", hardware=CPU_WITH_COMPILER, model=LLAMA
) -> Decision[str]:
    config = EngineConfig(model="tiny", cpu_graph=asked)
    facts = CheckpointFacts(load_format="safetensors", dtype="float32")
    return resolve(config, persona(model), hardware, checkpoint=facts, gains=gains).cpu_graph


def test_auto_is_off_until_somebody_measured() -> None:
    decision = decide()
    assert (decision.value, decision.asked) == ("off", False)
    assert "nobody measured" in decision.refused[0].reason
    assert "headrace.bench.cpu_graph" in decision.refused[0].remedy


def test_auto_follows_the_measurement() -> None:
    decision = decide(GAIN)
    assert (decision.value, decision.asked) == ("on", False)
    assert decision.reason == (
        "measured 2026-11-29: 1 rows 30.0 to 27.0 ms, 8 rows 60.0 to 50.0 ms"
    )
    worse = replace(GAIN, rows={"1": [30.0, 27.0], "8": [60.0, 59.9]})
    decision = decide(GAIN, worse)
    assert decision.value == "off"
    assert "59.9" in decision.refused[0].reason


@pytest.mark.parametrize("other", [{"model": QWEN3}, {"model": LLAMA | {"hidden_size": 128}}])
def test_a_measurement_of_another_model_says_nothing(other) -> None:
    assert "nobody measured" in decide(GAIN, **other).refused[0].reason


def test_a_measurement_in_another_dtype_says_nothing() -> None:
    assert decide(replace(GAIN, dtype="bfloat16")).value == "off"


def test_asked() -> None:
    on, off = decide(asked="on"), decide(GAIN, asked="off")
    assert (on.value, on.asked) == ("on", True)
    assert (off.value, off.asked, off.refused) == ("off", True, ())


@pytest.mark.parametrize(
    ("hardware", "reason", "remedy"),
    [(H100, "this is cuda", "auto or off"), (CPU, "no compiler", "nstall g\\+\\+")],
)
def test_on_is_refused_where_it_cannot_be(hardware, reason: str, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{reason}(.|\n)*{remedy}"):
        decide(asked="on", hardware=hardware)
    decision = decide(GAIN, hardware=hardware)
    assert decision.value == "off"
    assert reason in decision.refused[0].reason


def test_experts_are_not_compiled() -> None:
    with pytest.raises(UnsupportedError, match="products of experts"):
        decide(asked="on", model=QWEN3_MOE)
    assert decide(model=QWEN3_MOE).refused[0].reason.startswith("torch.compile is not given")


def test_measurements_are_kept_one_of_a_kind(cache: Path) -> None:
    assert kept.read_gains(CPU.name) == ()
    later = replace(GAIN, day="2026-12-01")
    others = (
        replace(GAIN, cpu="another"),
        replace(GAIN, torch="1.0"),
        replace(GAIN, threads=GAIN.threads + 1),
    )
    for gain in (GAIN, *others, later):
        assert kept.write_gain(gain) == cache / "cpu_graph.json"
    assert kept.read_gains(CPU.name) == (later,)
    assert kept.read_gains("another") == (others[0],)


@pytest.mark.parametrize("text", ["not json", '[{"cpu": "x"}]'])
def test_a_broken_file_is_told(cache: Path, text: str) -> None:
    (cache / "cpu_graph.json").write_text(text)
    with pytest.raises(ConfigError, match="does not hold measurements"):
        kept.read_gains(CPU.name)
