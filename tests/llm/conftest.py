import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))  # the tiny checkpoints live there

from tiny_engine import write_checkpoint
from tiny_llm import Reference, make_llm, make_reference

from headrace import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llm") / "llama", "llama")


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without tokenizer."""
    path = tmp_path_factory.mktemp("llm") / "plain"
    return write_checkpoint(path, "llama", with_tokenizer=False)


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlap"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with make_llm(folder, enable_overlap=request.param) as made:
        yield made


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("llm") / "reference")
