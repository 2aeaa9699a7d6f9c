"""For all tests."""

import gc
import importlib.util
import logging
from collections.abc import Iterator
from unittest import mock

import pytest

if importlib.util.find_spec("hypothesis"):  # a GPU's own Python may lack it
    from hypothesis import HealthCheck, settings

    # No example is a failure because the machine is busy.
    settings.register_profile(
        "headrace",
        settings.default,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("headrace")

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


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A verb of the command line sets up the log of its program; the next test has none yet."""
    log = logging.getLogger("headrace")
    handlers, level = log.handlers[:], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture
def grammars_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars are tried in this test."""
    monkeypatch.setattr(GrammarTrial, "run", TRY_GRAMMAR)
