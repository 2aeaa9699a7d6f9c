from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_engine import write_checkpoint

if TYPE_CHECKING:
    from state_cases import Reference


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "gemma", "gemma")


@pytest.fixture(scope="session")
def state_reference(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Reference]":
    """Family -> transformers' hidden states of a model of it."""
    from state_cases import Reference, write_model  # takes seconds, and few tests need it

    folder = tmp_path_factory.mktemp("states")
    return cache(lambda family: Reference(write_model(family, folder / family)))


@pytest.fixture(scope="session")
def llama(state_reference: "Callable[[str], Reference]") -> "Reference":
    return state_reference("llama")


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Products of a GPU in float32, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
