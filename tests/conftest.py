"""For all tests."""

import gc
from collections.abc import Iterator
from unittest import mock

import pytest

from headrace.sampling.grammar.trial import GrammarTrial

TRY_GRAMMAR = GrammarTrial.run


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """What collecting the tests has imported is set aside: engines come and go by the hundred, and
    looking through a million objects that stay, again and again, took a quarter of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def grammars_untried() -> Iterator[None]:
    """The process that tries grammars takes seconds to start, and engines come by the hundred."""
    with mock.patch.object(GrammarTrial, "run", return_value=None):
        yield


@pytest.fixture
def grammars_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars are tried in this test."""
    monkeypatch.setattr(GrammarTrial, "run", TRY_GRAMMAR)
