"""Compiles grammars beside the loop of steps, and keeps them.

Threads do it, at low priority, through a backend that bounds the time of a grammar: steps go on and
no thread is lost. What waits too long for one is turned away.

A thread ends as soon as nothing waits, and the program's end waits for those that are at work: one
that came back from C++ while Python goes would take the process down.
"""

import os
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

from headrace.base.errors import HeadraceError, RequestError, UnavailableError
from headrace.base.log import get_logger
from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.protocols import CompiledGrammar, GrammarBackend

log = get_logger(__name__)

CACHE_BYTES = 256 << 20
WORKERS = 2
WAIT_SECONDS = 60.0  # for a thread
EXIT_SECONDS = 10.0  # that the program's end waits for a thread


class Compilation:
    """A `PendingGrammar`."""

    def __init__(self, compiler: "GrammarCompiler", structured: StructuredOutput) -> None:
        self.structured = structured
        self.asked = time.monotonic()
        self._compiler = compiler
        self._ended = threading.Event()
        self._compiled: CompiledGrammar | None = None
        self._error: HeadraceError | None = None

    def poll(self, wait: float = 0.0) -> CompiledGrammar | None:
        if not self._ended.is_set() and not (wait and self._ended.wait(wait)):
            self._compiler.check_wait(self)
            return None
        if self._error is not None:
            raise self._error
        return self._compiled

    def wait(self) -> CompiledGrammar:
        """The grammar; raises as `poll` does."""
        while True:
            compiled = self.poll(0.1)
            if compiled is not None:
                return compiled

    def end(self, compiled: CompiledGrammar | None, error: HeadraceError | None) -> None:
        self._compiled, self._error = compiled, error
        self._ended.set()


class GrammarCompiler:
    """Grammars by their text, for one vocabulary. Safe to share between threads.

    Args:
        load: makes the backend; called once, by the first compilation.
        wait_seconds: a grammar may wait before its compilation begins.
        cache_bytes: grammars kept, the least recently used are dropped first.
    """

    def __init__(
        self,
        load: Callable[[], GrammarBackend],
        *,
        wait_seconds: float = WAIT_SECONDS,
        cache_bytes: int = CACHE_BYTES,
        workers: int = WORKERS,
    ) -> None:
        self._load, self._wait_seconds, self._cache_bytes = load, wait_seconds, cache_bytes
        self._max_workers = workers
        self._lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._loading = threading.Lock()
        self._is_closed = False
        self._cache: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._current: dict[StructuredOutput, Compilation] = {}
        self._queue: deque[Compilation] = deque()
        self._workers = 0

    def start(self, structured: StructuredOutput) -> Compilation:
        """The grammar, ready or on its way."""
        with self._lock:
            compiled = self._cache.get(structured)
            if compiled is not None:
                self._cache.move_to_end(structured)
                ready = Compilation(self, structured)
                ready.end(compiled, None)
                return ready
            current = self._current.get(structured)
            if current is None:
                current = self._current[structured] = Compilation(self, structured)
                self._queue.append(current)
                self._start_worker()
            return current

    def close(self) -> None:
        """What waits is never compiled."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0
            waiting = [self._queue.popleft() for _ in range(len(self._queue))]
        for compilation in waiting:
            compilation.end(None, RequestError("The engine was closed"))
        with self._loading:
            self._is_closed = True
            if self._backend is not None:
                self._backend.close()

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "grammars_cached": len(self._cache),
                "grammars_cached_bytes": self._cached_bytes,
                "grammars_compiling": len(self._current),
            }

    def check_wait(self, compilation: Compilation) -> None:
        """End a compilation that has waited too long for a thread."""
        if time.monotonic() - compilation.asked <= self._wait_seconds:
            return
        with self._lock:
            if compilation not in self._queue:
                return
            self._queue.remove(compilation)
            del self._current[compilation.structured]
        compilation.end(
            None,
            UnavailableError(
                "No grammar can be compiled now",
                why=f"others that take long have kept this one waiting {self._wait_seconds:g} s",
                remedy="Try again later",
            ),
        )

    def _start_worker(self) -> None:
        if self._queue and self._workers < self._max_workers:
            self._workers += 1
            thread = _Thread(self._work)
            weakref.finalize(thread, _end_with_program, thread.ended, self._queue)
            thread.start()

    def _work(self) -> None:
        if sys.platform == "linux":  # where priorities are those of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._lock:
                if not self._queue:
                    self._workers -= 1
                    return
                compilation = self._queue.popleft()
            self._compile(compilation)

    def _compile(self, compilation: Compilation) -> None:
        structured = compilation.structured
        compiled, error = None, None
        try:
            compiled = self._loaded().compile(structured)
        except HeadraceError as refusal:
            error = refusal
        except Exception as failure:
            log.error("A grammar could not be compiled", exc_info=failure)
            error = RequestError(
                f"The {structured.kind} of structured could not be compiled",
                why=f"{type(failure).__name__}: {str(failure)[:300]}",
            )
        with self._lock:
            del self._current[structured]
            if compiled is not None:
                self._keep(structured, compiled)
        compilation.end(compiled, error)

    def _loaded(self) -> GrammarBackend:
        with self._loading:
            if self._is_closed:
                raise RequestError("The engine was closed")
            if self._backend is None:
                self._backend = self._load()
            return self._backend

    def _keep(self, structured: StructuredOutput, compiled: CompiledGrammar) -> None:
        self._cache[structured] = compiled
        self._cached_bytes += compiled.size_bytes
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.size_bytes


class _Thread(threading.Thread):
    """`ended` is set when it holds nothing of the grammars any more."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(target=work, name="headrace-grammar", daemon=True)
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            super().run()  # lets go of `work` at its end
        finally:
            self.ended.set()


def _end_with_program(ended: threading.Event, queue: deque[Compilation]) -> None:
    """Let a thread end; called at the interpreter's exit, or when the thread is long gone."""
    if not ended.is_set():
        queue.clear()
        ended.wait(EXIT_SECONDS)
