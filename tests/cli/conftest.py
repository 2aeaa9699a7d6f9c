import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))  # the fake server and the config

from dummy_config import CONFIG
from fake_llm import FakeLLM


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """Every verb that loads a model gets this one."""
    llm = FakeLLM()
    for verb in ("generate", "chat"):
        monkeypatch.setattr(f"headrace.cli.{verb}.start", lambda arguments, **_: llm)
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
