"""An engine that threads share: they take turns, and their requests run in one batch."""

import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from headrace.base.errors import RequestError
from headrace.config.engine_config import EngineConfig
from headrace.engine.batch_arguments import for_each
from headrace.engine.engine import Engine
from headrace.engine.interrupts import interrupts_held
from headrace.engine.outputs import Piece
from headrace.engine.progress import Progress
from headrace.engine.requests import PreparedRequest, RequestHandle
from headrace.engine.turns import Turns


class SharedEngine:
    """Runs requests to their ends, each in the thread that asks for it.

    Args:
        show_progress: a bar while weights load.
    """

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        with _own_torch():
            self._engine: Engine | None = Engine(config, progress=show_progress)
        self._process = os.getpid()
        self._turns = Turns()
        self._left: deque[str] = deque()  # requests whose callers went away
        # A thread that is in a step as the interpreter ends would take the process down.
        weakref.finalize(self, _close, weakref.ref(self))

    @property
    def engine(self) -> Engine:
        """The engine underneath; raises `RequestError` after `close`, and in a forked process."""
        if os.getpid() != self._process:
            raise RequestError(
                "This LLM was made in another process, of which this one is a fork",
                why="threads and GPUs that it needs stayed there, and a step might wait forever",
                remedy='Make it where it is used; multiprocessing\'s "spawn" forks nothing',
            )
        if self._engine is None:
            raise RequestError("This LLM is closed", remedy="Make a new one")
        return self._engine

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the engine for this thread alone."""
        with _own_torch(), self._turn():
            yield

    def run(self, prepared: Sequence[PreparedRequest], *, bar: bool) -> list[RequestHandle]:
        """Run requests to their ends.

        Args:
            bar: show how many have ended.
        """
        for_each(PreparedRequest.wait, prepared)  # for grammars, compiled side by side until now
        handles: list[RequestHandle] = []
        try:
            with _own_torch():
                self._run(prepared, handles, bar)
        except BaseException:
            self._leave(handles)
            raise
        return handles

    def stream(self, prepared: PreparedRequest) -> Generator[Piece, None, None]:
        """Run a request, piece by piece; who leaves early aborts it."""
        handles: list[RequestHandle] = []
        try:
            with interrupts_held(), self.turn():
                handles.append(self.engine.submit(prepared))
            (handle,) = handles
            is_finished = False
            while not is_finished:
                with _own_torch():
                    self._step(handle)
                with self._turn():
                    is_finished, pieces = handle.is_finished, handle.take_pieces()
                yield from pieces
        finally:
            self._leave(handles)

    def close(self) -> None:
        """Abort what runs and give the model's memory back. Closing twice is fine.

        In a fork nothing happens: all is its parent's.
        """
        if os.getpid() != self._process:
            return
        with self._turns:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            with self._turns:
                yield
        finally:
            self._abort_left()

    def _run(
        self, prepared: Sequence[PreparedRequest], handles: list[RequestHandle], bar: bool
    ) -> None:
        """`handles` is filled first, so that who calls can abort them."""
        with interrupts_held(), self._turn():
            handles += map(self.engine.submit, prepared)
        running = {handle.request_id: handle for handle in handles}
        with interrupts_held() as held, Progress(len(handles), shown=bar) as progress:
            for handle in handles:
                while not handle.is_finished:
                    ended = self._step(handle)
                    held.raise_pressed()
                    progress.count([own for own in ended if running.pop(own.request_id, None)])
            progress.count(running.values())  # these ended in steps of other threads

    def _step(self, handle: RequestHandle) -> list[RequestHandle]:
        """One step, unless the request has ended meanwhile: by another thread, or by `close`."""
        with self._turn():
            return [] if handle.is_finished else self.engine.step()

    def _leave(self, handles: Sequence[RequestHandle]) -> None:
        """Abort what has not ended.

        Never waits: the garbage collector may end a stream in the middle of anything, a turn of
        this very thread included. Who has the turn sees to it at its end.
        """
        self._left.extend(handle.request_id for handle in handles if not handle.is_finished)
        self._abort_left()

    def _abort_left(self) -> None:
        while self._left and self._turns.take_if_free():
            try:
                left = [self._left.popleft() for _ in range(len(self._left))]
                if self._engine is not None:
                    self._engine.abort(left)
            finally:
                self._turns.give_back()


def _close(reference: "weakref.ref[SharedEngine]") -> None:
    """Close it, if it is still there: at the interpreter's exit."""
    shared = reference()
    if shared is not None:
        shared.close()


def _own_torch() -> AbstractContextManager[object]:
    """Within, what the program around has told torch about all its code does not count.

    Tensors that name no device lie on the host, matrices are multiplied in their own dtype, and
    what is made in inference mode can be written outside of it. Asking takes ten microseconds.
    """
    told: list[AbstractContextManager[object]] = []
    if torch.get_default_device().type != "cpu":
        told.append(torch.device("cpu"))
    if torch.is_inference_mode_enabled():
        told.append(torch.inference_mode(False))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            told.append(torch.autocast(kind, enabled=False))
    if not told:
        return nullcontext()
    undone = ExitStack()
    for context in told:
        undone.enter_context(context)
    return undone
