import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))  # the tiny checkpoints live there

from tiny_engine import make_engine, write_checkpoint

from headrace.engine.engine import Engine


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("observed") / "llama", "llama")


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("observed") / "moe", "moe")


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("observed") / "gemma", "gemma")


@pytest.fixture
def engine(llama_folder: Path) -> Engine:
    return make_engine(llama_folder, enable_prefix_cache=False)
