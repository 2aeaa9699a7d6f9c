import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))  # the fake server lives there

from fake_llm import FakeLLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """Every verb that loads a model gets this one."""
    llm = FakeLLM()
    for verb in ("generate", "chat"):
        monkeypatch.setattr(f"headrace.cli.{verb}.start", lambda arguments: llm)
    return llm


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What comes on standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.fixture(scope="session")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of which only the config is there: enough for dummy weights."""
    folder: Path = tmp_path_factory.mktemp("config") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)
