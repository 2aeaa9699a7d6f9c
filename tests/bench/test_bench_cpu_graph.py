"""What is measured of the CPU graph is turns on both paths, and it is kept."""

import json
from pathlib import Path

import pytest

from headrace import LLM
from headrace.bench import cpu_graph
from headrace.runner.cpu_graph_gains import read_gains, write_gain

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def test_both_paths_are_timed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headrace.runner.detect.compilers", lambda: frozenset({"g++"}))
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with LLM(str(tmp_path), load_format="dummy", device="cpu", cpu_graph="on") as llm:
        gain = cpu_graph.measure(llm, rows=(1, 3), turns=5)
        counts = llm.engine.worker.runner.selector.counts
        steps = {
            name: sum(n for (path, _), n in counts.items() if path == name)
            for name in ("cpu_graph", "eager")
        }
        assert steps["cpu_graph"] >= 10
        assert steps["eager"] >= 10
        assert llm.engine.worker.runner.selector.paths[0].name == "cpu_graph"
    assert list(gain.rows) == ["1", "3"]
    assert all(time > 0 for times in gain.rows.values() for time in times)
    write_gain(gain)
    assert read_gains(gain.cpu) == (gain,)
