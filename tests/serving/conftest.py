import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))  # the tiny checkpoints live there

from chat_checkpoint import TEMPLATES, write_chat_checkpoint
from fake_engine import FakeEngine
from starlette.testclient import TestClient
from tiny_engine import write_checkpoint
from tool_chat import Chat

from headrace.config.engine_config import EngineConfig
from headrace.serving.app import make_app
from headrace.serving.prompts import load_tokenizer
from headrace.serving.server_config import ServerConfig
from headrace.serving.service import Service
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("serving") / "tiny", "llama")


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    made = load_tokenizer(EngineConfig(model=str(tiny_folder)))
    assert made is not None
    return made


@pytest.fixture(scope="session")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a chat template that knows tools and reasoning."""
    folder = write_chat_checkpoint(tmp_path_factory.mktemp("serving") / "reasoner", "hermes")
    made = load_tokenizer(EngineConfig(model=str(folder)))
    assert made is not None
    return made


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_service(engine: FakeEngine, tokenizer: Tokenizer) -> Callable[..., Service]:
    def make(**options: Any) -> Service:
        config = ServerConfig(**options)
        return Service(
            config=config, asked=EngineConfig(model="tiny"), engine=engine, tokenizer=tokenizer
        )

    return make


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


@pytest.fixture
def http(service: Service) -> Iterator[TestClient]:
    """A client that raises nothing: a bug of the server is a 500 to it, as to anybody."""
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for family in TEMPLATES:
        folder = write_chat_checkpoint(tmp_path_factory.mktemp("chat") / family, family)
        tokenizer = load_tokenizer(EngineConfig(model=str(folder)))
        assert tokenizer is not None
        made[family] = tokenizer
    return made


@pytest.fixture
def chat(tokenizers: dict[str, Tokenizer], engine: FakeEngine) -> Iterator[Callable[..., Chat]]:
    """Makes a server for a family."""
    clients: list[TestClient] = []

    def make(family: str, **options: Any) -> Chat:
        service = Service(
            config=ServerConfig(**options), asked=EngineConfig(model="tiny"), engine=engine,
            tokenizer=tokenizers[family],
        )  # fmt: skip
        client = TestClient(make_app(service), raise_server_exceptions=False)
        clients.append(client)
        return Chat(client, engine)

    yield make
    for client in clients:
        client.close()
