"""Compilations beside the loop: kept, shared, bounded in time, never in each other's way."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.base.errors import RequestError, UnavailableError
from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.compiler import GrammarCompiler


class Compiled:
    def __init__(self, size_bytes: int = 10) -> None:
        self.size_bytes = size_bytes
        self.matcher: Any = None


class Backend:
    """Compiles at once; what a test holds back waits for it."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.closed = 0
        self.held: dict[str, threading.Event] = {}
        self.raises: dict[str, Exception] = {}

    def hold(self, *texts: str) -> None:
        self.held |= {text: threading.Event() for text in texts}

    def compile(self, structured: StructuredOutput) -> Any:
        text = structured.text
        if text in self.held:
            assert self.held[text].wait(20)
        if text in self.raises:
            raise self.raises[text]
        self.compiled.append(text)
        return Compiled(int(text) if text.isdecimal() else 10)

    def close(self) -> None:
        self.closed += 1


def form(text: str) -> StructuredOutput:
    return StructuredOutput(regex=text)


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    for event in made.held.values():
        event.set()


@pytest.fixture
def make(backend: Backend) -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def compiler(**options: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(lambda: backend, **options))
        return made[-1]

    yield compiler
    for each in made:
        each.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_grammar_is_compiled_once_and_kept(make, backend: Backend) -> None:
    compiler = make()
    backend.hold("a")
    first, second = compiler.start(form("a")), compiler.start(form("a"))
    assert first is second
    assert first.poll() is None
    backend.held["a"].set()
    compiled = first.wait()
    assert compiler.start(form("a")).poll() is compiled
    assert backend.compiled == ["a"]
    assert compiler.stats()["grammars_cached"] == 1


def test_the_least_recently_used_are_dropped(make, backend: Backend) -> None:
    compiler = make(cache_bytes=100)
    for text in ("40", "50", "40", "60", "40", "50"):
        compiler.start(form(text)).wait()
    assert backend.compiled == ["40", "50", "60", "50"]
    assert compiler.stats()["grammars_cached_bytes"] <= 100
    assert compiler.start(form("500")).wait().size_bytes == 500


def test_a_slow_one_holds_up_nobody(make, backend: Backend) -> None:
    compiler = make()
    backend.hold("slow")
    slow = compiler.start(form("slow"))
    assert compiler.start(form("quick")).wait() is not None
    assert slow.poll(0.01) is None


@pytest.mark.parametrize("error", [RequestError("no"), RuntimeError("odd")])
def test_errors_reach_who_asked_and_the_thread_lives(
    make, backend: Backend, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = make(workers=1)
    backend.raises["bad"] = error
    for _ in range(2):
        with pytest.raises(RequestError, match=str(error)):
            compiler.start(form("bad")).wait()
    assert compiler.start(form("good")).wait() is not None
    assert compiler.stats()["grammars_cached"] == 1


def test_what_waits_too_long_for_a_thread_is_turned_away(make, backend: Backend) -> None:
    compiler = make(wait_seconds=0.01, workers=1)
    backend.hold("long")
    long = compiler.start(form("long"))
    until(lambda: not compiler._queue)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="No grammar can be compiled now"):
            compiler.start(form("quick")).wait()
    assert long.poll() is None  # it is being compiled, and waits for nothing
    assert compiler.stats()["grammars_compiling"] == 1
    backend.held["long"].set()
    assert long.wait() is not None
    assert backend.compiled == ["long"]


def test_a_load_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Backend:
        raise ImportError("broken")

    compiler = GrammarCompiler(load)
    with pytest.raises(RequestError, match="ImportError: broken"):
        compiler.start(form("a")).wait()
    compiler.close()


def test_closing_ends_what_waits_and_the_threads(make, backend: Backend) -> None:
    compiler = make(workers=1)
    backend.hold("a")
    compiler.start(form("a"))
    until(lambda: compiler._backend is backend)
    waiting = compiler.start(form("b"))
    compiler.close()
    assert backend.closed == 1
    with pytest.raises(RequestError, match="closed"):
        waiting.wait()
    backend.held["a"].set()
    until(lambda: compiler._workers == 0)
    with pytest.raises(RequestError, match="closed"):
        compiler.start(form("c")).wait()


def test_many_threads_at_once(make, backend: Backend) -> None:
    compiler = make()
    got: list[Any] = []

    def ask(text: str) -> None:
        got.append(compiler.start(form(text)).wait())

    threads = [threading.Thread(target=ask, args=(f"t{i % 7}",)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 40
    assert sorted(backend.compiled) == [f"t{i}" for i in range(7)]
    assert compiler._workers <= 2
