"""The engine's end of the socket, and what else may wake it: signals."""

import signal
import socket
from contextlib import suppress
from types import FrameType

import msgspec
import zmq

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.request.messages import (
    Failure,
    FromEngine,
    Refused,
    SubmitHead,
    ToEngine,
)

log = get_logger(__name__)

LINGER_MILLISECONDS = 2000  # last words are sent for so long
_READABLE = int(zmq.POLLIN)

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Link:
    """Takes messages without blocking while there is work, and sleeps when there is none.

    Attributes:
        stop_signals: how many signals asked the process to stop, since `catch_signals`.
    """

    def __init__(self, address: str) -> None:
        self.stop_signals = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # the face always reads, so no queue grows for long
        self._socket.linger = LINGER_MILLISECONDS
        self._socket.connect(address)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def catch_signals(self) -> None:
        """From now on a signal to stop is counted, and wakes `receive`. Main thread only."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for each in _STOPPING:
            signal.signal(each, self._count)

    def send(self, message: FromEngine) -> None:
        """Hand a message to the socket's own thread; never waits."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self, wait: float | None) -> list[ToEngine]:
        """Messages that have come.

        Args:
            wait: sleep until there is one, or a signal, at most so many seconds; 0: not at all;
                `None`: for ever.
        """
        if wait != 0:
            self._poller.poll(None if wait is None else max(1, round(wait * 1000)))
            self._forget_wakes()
        messages: list[ToEngine] = []
        while int(self._socket.get(zmq.EVENTS)) & _READABLE:  # an exception a turn would cost more
            data = self._socket.recv(zmq.NOBLOCK)
            try:
                messages.append(self._decoder.decode(data))
            except msgspec.MsgspecError as error:
                self._refuse_unreadable(data, error)
        return messages

    def close(self) -> None:
        """Send what is left, for a short while, and hang up."""
        signal.set_wakeup_fd(-1)
        self._socket.close()
        self._context.term()
        self._woken.close()
        self._waker.close()

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.stop_signals += 1

    def _forget_wakes(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _refuse_unreadable(self, data: bytes, error: Exception) -> None:
        """A request whose options changed after their check is its own loss, nobody else's."""
        request_id = msgspec.msgpack.decode(data, type=SubmitHead).request_id
        log.warning("Request %s cannot be read: %s", request_id, error)
        refusal = RequestError("The request cannot be read", why=str(error))
        self.send(Refused(request_id, Failure.of(refusal)))
