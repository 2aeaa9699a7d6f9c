"""Compiles grammars beside the loop of steps, and keeps them.

Threads do it, at low priority; a grammar library leaves Python while it works, so steps go on. A
compilation cannot be broken off: one that takes too long is refused and left to end by itself, and
another thread takes its place, up to a number. What it makes in the end is kept, so that asking
again later can succeed.

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

from headrace.base.errors import RequestError, UnavailableError
from headrace.base.log import get_logger
from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.protocols import CompiledGrammar, GrammarBackend

log = get_logger(__name__)

COMPILE_SECONDS = 10.0
CACHE_BYTES = 256 << 20
WORKERS = 2
EXIT_SECONDS = 10.0  # that the program's end waits for a thread
MAX_OVERDUE = 2  # threads that may be busy with compilations that were given up


class Compilation:
    """A `PendingGrammar`."""

    def __init__(self, compiler: "GrammarCompiler", structured: StructuredOutput) -> None:
        self.structured = structured
        self.started: float | None = None
        self.is_overdue = False
        self._compiler = compiler
        self._ended = threading.Event()
        self._compiled: CompiledGrammar | None = None
        self._error: RequestError | None = None

    def poll(self, wait: float = 0.0) -> CompiledGrammar | None:
        if not self._ended.is_set() and not (wait and self._ended.wait(wait)):
            self._compiler.check_time(self)
            return None
        if self._error is not None:
            raise self._error
        return self._compiled

    def wait(self) -> CompiledGrammar:
        """The grammar; raises as `check_time` does when it will not be there in time."""
        while True:
            compiled = self.poll(0.1)
            if compiled is not None:
                return compiled

    def end(self, compiled: CompiledGrammar | None, error: RequestError | None) -> None:
        self._compiled, self._error = compiled, error
        self._ended.set()


class GrammarCompiler:
    """Grammars by their text, for one vocabulary. Safe to share between threads.

    Args:
        load: makes the backend; called once, by the first compilation, outside its time.
        seconds: one compilation may take.
        cache_bytes: grammars kept, the least recently used are dropped first.
    """

    def __init__(
        self,
        load: Callable[[], GrammarBackend],
        *,
        seconds: float = COMPILE_SECONDS,
        cache_bytes: int = CACHE_BYTES,
        workers: int = WORKERS,
    ) -> None:
        self._load, self._seconds, self._cache_bytes = load, seconds, cache_bytes
        self._max_workers = workers
        self._lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._loading = threading.Lock()
        self._cache: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._current: dict[StructuredOutput, Compilation] = {}
        self._queue: deque[Compilation] = deque()
        self._workers = self._overdue = 0

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

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "grammars_cached": len(self._cache),
                "grammars_cached_bytes": self._cached_bytes,
                "grammars_compiling": len(self._current),
                "grammars_overdue": self._overdue,
            }

    def check_time(self, compilation: Compilation) -> None:
        """Raise `RequestError` for a compilation that takes too long, `UnavailableError` for one
        that cannot begin."""
        with self._lock:
            began = compilation.started
            if began is not None and time.monotonic() - began > self._seconds:
                if not compilation.is_overdue:
                    compilation.is_overdue = True
                    self._overdue += 1
                    self._start_worker()
                raise RequestError(
                    f"The {compilation.structured.kind} of structured takes more than "
                    f"{self._seconds:g} s to compile",
                    why="So large a grammar would hold up others",
                    remedy="Make it smaller: fewer properties, values, levels or repetitions",
                )
            if began is None and self._overdue >= self._max_workers + MAX_OVERDUE:
                raise UnavailableError(
                    "No grammar can be compiled now",
                    why=f"{self._overdue} that take too long are still under way",
                    remedy="Try again later",
                )

    def _start_worker(self) -> None:
        if self._queue and self._workers < self._max_workers + min(self._overdue, MAX_OVERDUE):
            self._workers += 1
            thread = _Thread(self._work)
            weakref.finalize(thread, _end_with_program, thread.ended, self._queue)
            thread.start()

    def _work(self) -> None:
        if sys.platform == "linux":  # where priorities are those of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._lock:
                is_replaced = self._workers - self._overdue > self._max_workers
                if is_replaced or not self._queue:
                    self._workers -= 1
                    return
                compilation = self._queue.popleft()
            self._compile(compilation)

    def _compile(self, compilation: Compilation) -> None:
        structured = compilation.structured
        compiled, error = None, None
        try:
            backend = self._loaded()
            compilation.started = time.monotonic()
            compiled = backend.compile(structured)
        except RequestError as refusal:
            error = refusal
        except Exception as failure:
            log.error("A grammar could not be compiled", exc_info=failure)
            error = RequestError(
                f"The {structured.kind} of structured could not be compiled",
                why=f"{type(failure).__name__}: {str(failure)[:300]}",
            )
        with self._lock:
            self._overdue -= compilation.is_overdue
            compilation.is_overdue = False
            del self._current[structured]
            if compiled is not None:
                self._keep(structured, compiled)
        compilation.end(compiled, error)

    def _loaded(self) -> GrammarBackend:
        with self._loading:
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
