"""The engine's process as its parent holds it: the process, the socket, news of its death."""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import zmq

from headrace.base.errors import ConfigError
from headrace.config.engine_config import EngineConfig
from headrace.request.messages import FromEngine, Hello, ToEngine

PROGRAM = (sys.executable, "-m", "headrace.engine.process")
LAST_WORDS_SECONDS = 0.1  # what a child sent before it died may still be on its way
_READABLE = int(zmq.POLLIN)
MAX_ADDRESS = 100  # bytes of a socket's path; the kernel takes 107


class ChildProcess:
    """Starts the process at once. Belongs to one event loop, and to one thread: the kernel ends the
    child together with the thread that started it.

    The socket lies in a folder of its own that nobody else may enter, and that goes as soon as the
    child is connected, so that nothing is left behind however the two end.

    Args:
        program: command line without the options.
        on_message: called with every message but the hello.
        on_exit: called once, with the reason in words, after the last message.
    """

    def __init__(
        self,
        config: EngineConfig,
        program: Sequence[str],
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_exit = on_message, on_exit
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        try:
            address = _address(self._folder)
            self._socket.bind(address)
            self._process = subprocess.Popen(
                [*program, *_options(address, config)],
                stdin=subprocess.PIPE,  # held open and never written: its end tells of ours
                start_new_session=True,  # Ctrl-C is for us, who let the child drain
            )
        except BaseException:
            self._hang_up()
            raise
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._died)
        self._loop.add_reader(self._socket.fileno(), self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send a message; never waits. To a child that is gone it goes nowhere.

        Raises:
            ValueError, OverflowError, TypeError: it holds what no message can.
        """
        data = self._encoder.encode(message)
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return  # not connected any more: `on_exit` is about to say so
        self._loop.call_soon(self._read)  # sending may have taken the wake-up of what came in

    def kill(self) -> None:
        """End it now; `on_exit` follows."""
        self._process.kill()

    def _read(self) -> None:
        """Take every message that is there: the socket wakes us once, however many have come."""
        if self._socket.closed:
            return
        while int(self._socket.get(zmq.EVENTS)) & _READABLE:
            message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            if isinstance(message, Hello):
                shutil.rmtree(self._folder)
            else:
                self._on_message(message)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._loop.call_later(LAST_WORDS_SECONDS, self._end, code)

    def _end(self, code: int) -> None:
        self._read()
        self._loop.remove_reader(self._socket.fileno())
        self._hang_up()
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        self._on_exit(_reason(code))

    def _hang_up(self) -> None:
        self._socket.close()
        self._context.term()
        if self._folder.exists():  # it never said hello
            shutil.rmtree(self._folder)


def _address(folder: Path) -> str:
    path = folder / "engine"
    if len(os.fsencode(path)) > MAX_ADDRESS:
        raise ConfigError(
            f"The folder of temporary files is {tempfile.gettempdir()}",
            why=f"a socket in it would have a path of more than {MAX_ADDRESS} bytes",
            remedy="Set TMPDIR to a shorter path",
        )
    return f"ipc://{path}"


def _options(address: str, config: EngineConfig) -> list[str]:
    level = logging.getLogger("headrace").getEffectiveLevel()
    return [
        *("--address", address),
        *("--config", json.dumps(asdict(config))),
        *("--log-level", logging.getLevelName(level).lower()),
    ]


def _reason(code: int) -> str:
    if code == 0:
        return "it was asked to stop"
    if code > 0:
        return f"it ended with exit code {code}; its log says why"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
    return f"it was ended by {name}{hint}"
