"""What the dry steps compile is all that any step launches, and not much more."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import headrace

pytest.importorskip("triton", reason="the kernels need the triton package")

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GEMMA3 = QWEN3 | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("qwen3", QWEN3), ("gemma3", GEMMA3)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    kernels = Path(__file__).parent.parent / "kernels"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{Path(headrace.__file__).parents[1]}{os.pathsep}{kernels}"
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("dry_steps.py")),
            *(str(folder / name) for name in ("qwen3", "gemma3")),
            "--deterministic",
            *(str(folder / name) for name in ("qwen3", "gemma3")),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "qwen3 deterministic", "gemma3 deterministic"]
)
def test_no_step_launches_what_the_dry_steps_did_not_compile(told: Any, family: str) -> None:
    assert told[family]["later"] == []


def test_every_kernel_of_a_decoder_is_there(told: Any) -> None:
    counts = Counter(told["qwen3"]["ahead"])
    assert set(counts) == {
        *("_prepare_kernel", "_advance_kernel", "_norm_kernel", "_rope_kernel", "_gate_kernel"),
        *("_matvec_kernel", "_few_rows_kernel", "decode_kernel", "combine_kernel"),
        *("extend_kernel", "_score_kernel", "narrow_kernel"),
        *("_prepare_extend_kernel", "_lengths_kernel", "_count_kernel", "_list_kernel"),
    }
    assert counts["_count_kernel"] == counts["_list_kernel"] == 1
    assert counts["_few_rows_kernel"] >= 5  # by rows and shapes
    assert counts["_score_kernel"] == 3  # plain, and before and behind the filters
    assert counts.total() < 60


def test_deterministic_kernels_have_few_variants(told: Any) -> None:
    counts = Counter(told["qwen3 deterministic"]["ahead"])
    assert counts["attend_kernel"] == 5  # decode in a graph and outside, whole or spread; extend
    assert 5 <= counts["_product_kernel"] <= 30  # by rows and shapes
    assert 1 <= counts["_few_rows_kernel"] <= 12
    others = ("_matvec_kernel", "_gate_kernel", "decode_kernel")
    assert not any(counts[name] for name in others)


def test_windows_are_compiled_for_too(told: Any) -> None:
    """The full layers of the second model find the kernels of the first."""
    counts = Counter(told["gemma3"]["ahead"])
    assert (counts["decode_kernel"], counts["extend_kernel"]) == (5, 1)


def test_the_kv_canary_is_compiled_ahead_for_each_group(told: Any) -> None:
    """Decode steps and others, of which a sweep of the prefix cache is one."""
    counts = Counter(told["gemma3"]["ahead"])
    assert (counts["_before_kernel"], counts["_after_kernel"]) == (4, 4)


def test_a_shortened_model_keeps_two_layers_of_each_kind() -> None:
    pytest.importorskip("triton")
    from types import SimpleNamespace

    from headrace.runner.dry_steps import shortened

    layers = nn.ModuleList(nn.Identity() for _ in range(6))
    decoder = SimpleNamespace(layers=layers, rope_of_layer=("a", "a", "b", "a", "b", "b"))
    kinds: Any = ("near", "near", "far", "near", "far", "far")
    model: Any = SimpleNamespace(model=decoder, traits=SimpleNamespace(layers=kinds))
    with shortened(model):
        assert list(decoder.layers) == [layers[place] for place in (0, 1, 2, 4)]
        assert decoder.rope_of_layer == ("a", "a", "b", "b")
    assert decoder.layers is layers
    assert len(decoder.rope_of_layer) == 6
