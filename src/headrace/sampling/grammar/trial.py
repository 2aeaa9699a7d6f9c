"""Compilations are tried in a process before they are done in ours: nothing else can break off a
library that takes for ever, or survive one that an odd grammar brings down.

What passed is compiled again here, since to write a compiled grammar down and to read it can take
longer than to make it.
"""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from headrace.base.errors import RequestError, UnavailableError
from headrace.request.structured_output import StructuredOutput

PROGRAM = (sys.executable, "-m", "headrace.sampling.grammar.trial_program")
COMPILE_SECONDS = 10.0
COMPILE_BYTES = 512 << 20
OUT_OF_MEMORY = 3  # exit status


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """The tokens of a model.

    Attributes:
        pieces: bytes of each token. hidden: ids of special and end tokens, which are no text.
        vocab_size: V of the model.
    """

    pieces: Sequence[bytes]
    hidden: frozenset[int]
    vocab_size: int

    def texts(self, shown: frozenset[int]) -> list[bytes]:
        """Bytes of each token where these special tokens are text; those of others are none."""
        hidden = self.hidden - shown
        return [b"" if token in hidden else piece for token, piece in enumerate(self.pieces)]


class GrammarTrial:
    """Tries forms, one at a time. Safe to share between threads.

    The process starts when it is first needed, and again after one that ended.

    Args:
        seconds, size_bytes: computing time and memory of one compilation.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        seconds: float = COMPILE_SECONDS,
        size_bytes: int = COMPILE_BYTES,
    ) -> None:
        self._tokens, self._seconds, self._size_bytes = tokens, seconds, size_bytes
        self._running: tuple[subprocess.Popen[bytes], Any] | None = None
        self._turn = threading.Lock()
        self._is_closed = False

    def run(self, structured: StructuredOutput, shown: frozenset[int]) -> None:
        """Compile a form, for better or worse: whether it is a grammar is not said.

        Args:
            shown: special tokens that are text in it.

        Raises:
            RequestError: it takes too much.
            UnavailableError: no process can be started.
        """
        with self._turn:
            while (status := self._run(structured, shown)) == 0:
                pass  # it ended for want of work just now
        if status is not None:
            raise self._refusal(structured, status)

    def close(self) -> None:
        self._is_closed = True
        running = self._running  # which ends with its form at any moment
        if running is not None:
            running[0].kill()  # who waits for it hears of that
        with self._turn:
            self._end()

    def _run(self, structured: StructuredOutput, shown: frozenset[int]) -> int | None:
        """The exit status of a process that ended over it."""
        if self._is_closed:
            raise RequestError("The engine was closed")
        if self._running is not None and self._running[0].poll() is not None:
            self._end()  # for want of work, or killed in a pause
        _, connection = self._running or self._start()
        try:
            connection.send((structured, shown))
            connection.recv()
        except (EOFError, OSError):
            return self._end()
        return None

    def _end(self) -> int | None:
        """The exit status, once the process has ended."""
        if self._running is None:
            return None
        process, connection = self._running
        self._running = None
        connection.close()
        return process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], Any]:
        ours, theirs = Pipe()
        with theirs:
            try:
                process = subprocess.Popen(
                    [*PROGRAM, str(theirs.fileno()), str(self._seconds), str(self._size_bytes)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is not for it
                )
            except OSError as error:
                raise UnavailableError(
                    "No grammar can be compiled now",
                    why=f"the process that tries them cannot be started: {error}",
                    remedy="Try again later",
                ) from error
        self._running = process, ours
        if self._is_closed:  # meanwhile, and saw no process to end
            process.kill()
        with contextlib.suppress(OSError):  # it is gone: who asks it something hears of that
            ours.send(self._tokens)
        return process, ours

    def _refusal(self, structured: StructuredOutput, status: int) -> RequestError:
        """Why the process ended in the middle of a form."""
        if status == -signal.SIGPROF:
            what, why = f"takes more than {self._seconds:g} s to compile", "it would hold up others"
        elif status == OUT_OF_MEMORY:
            what, why = f"takes more than {self._size_bytes >> 20} MiB to compile", ""
        else:
            what, why = "cannot be compiled", f"the process that did it ended with status {status}"
        return RequestError(
            f"The {structured.kind} of structured {what}",
            why=why,
            remedy="Make it smaller: fewer properties, values, levels or repetitions",
        )
