"""The loop of the engine's process: take messages, take a turn, tell what is new."""

import math
import time

from headrace.base.errors import UnavailableError
from headrace.base.log import get_logger
from headrace.engine.engine import Engine
from headrace.engine.outputs import Piece
from headrace.engine.process.controls import Controls
from headrace.engine.process.entrance import Entrance
from headrace.engine.process.link import Link
from headrace.engine.process.pulse import Pulse
from headrace.engine.requests import RequestHandle
from headrace.request.messages import (
    Abort,
    Control,
    Delta,
    Draining,
    Failure,
    Refused,
    Stop,
    Submit,
    Turn,
)
from headrace.request.outcome import Finished

log = get_logger(__name__)

# What a signal to stop grants: the face has the deadline, and supervisors signal both. The second
# one grants nothing.
SIGNAL_DRAIN_SECONDS = math.inf
QUIET_SECONDS = 0.1  # after a request: the next one often comes within a moment
SIGN_SECONDS = 5.0  # of work without news, after which the face is told that it goes on
GRAMMAR_SECONDS = 0.005  # between two looks at grammars that are being compiled, when idle
ABORTED = "aborted by the caller"
STOPPED = "the engine was stopped"


class ServingLoop:
    """Serves one face until it is asked to stop, by a message or a signal.

    Batches are chosen by what has come and never by a clock; only the deadline of a drain is one,
    and it acts as an abort.
    """

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine, self._link = engine, link
        self._controls = Controls(engine)
        self._pulse = Pulse(engine)
        self._entrance = Entrance(engine, refuse=link.send)
        self._handles: dict[str, RequestHandle] = {}
        self._news: list[Delta] = []
        self._deadline: float | None = None  # of the drain
        self._signals = 0
        self._told_at = time.monotonic()
        self._is_prepared = False  # every graph that idle moments are for is captured
        self._is_quiet = True  # no step for so long that a capture is unlikely to be in the way

    def run(self) -> None:
        """Returns when it was asked to stop and every request has its ending."""
        try:
            while not self._is_over():
                has_come = self._take(wait=self._patience())
                self._admit()
                self._send_news()  # who was accepted hears so before a step that may be long
                if self._engine.has_work:
                    self._pulse.before_step()
                    self._engine.step()
                    self._pulse.after_step()
                    self._is_quiet = False
                elif not self._is_prepared and self._entrance.is_empty:
                    self._is_quiet = self._is_quiet or not has_come
                    if self._is_quiet:
                        self._prepare_more()
                self._tell()
        finally:
            self._engine.close()

    # ---- from the face

    def _patience(self) -> float | None:
        """How long to wait for messages."""
        if self._engine.has_work:
            return 0
        if not self._entrance.is_empty:
            return GRAMMAR_SECONDS
        if self._is_prepared:
            return None
        return 0 if self._is_quiet else QUIET_SECONDS

    def _prepare_more(self) -> None:
        """One graph, then messages again: who comes meanwhile waits for one capture at most."""
        try:
            self._is_prepared = not self._engine.prepare_in_idle()
        except Exception:
            log.exception("A graph could not be captured while idle: left to the steps that ask")
            self._is_prepared = True

    def _take(self, wait: float | None) -> bool:
        """Whether anything has come."""
        left: list[str] = []
        messages = self._link.receive(wait)
        for message in messages:
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                left += message.request_ids
            elif isinstance(message, Control):
                self._link.send(self._controls.reply(message))
            else:
                self._drain(message)
        if left:
            self._abort(left, ABORTED)
        if self._link.stop_signals > self._signals:
            self._signals = self._link.stop_signals
            self._drain(Stop(SIGNAL_DRAIN_SECONDS if self._signals == 1 else 0.0))
        return bool(messages)

    def _submit(self, submit: Submit) -> None:
        if self._deadline is None:
            self._entrance.take(submit)
            return
        error = UnavailableError("The engine takes nothing new", why="it is being stopped")
        self._link.send(Refused(submit.request_id, Failure.of(error)))

    def _admit(self) -> None:
        for handle in self._entrance.admit():
            self._handles[handle.request_id] = handle
            prompt_tokens = len(handle.request.prompt_token_ids)
            self._news.append(Delta(handle.request_id, prompt_tokens=prompt_tokens))

    def _abort(self, request_ids: list[str], message: str) -> None:
        ending = Finished("abort", message=message)
        for submit in self._entrance.leave(request_ids):
            for index in range(submit.params.n):
                self._news.append(Delta(submit.request_id, index, finished=ending))
        self._engine.abort(request_ids, message=message, settle=False)

    # ---- to the face

    def _tell(self) -> None:
        """Gather what is new of all requests and send it."""
        ended = []
        for handle in self._handles.values():
            for piece in handle.take_pieces():
                self._news.append(_delta(handle, piece))
            if handle.is_finished:
                ended.append(handle.request_id)
        for request_id in ended:
            del self._handles[request_id]
        self._send_news()

    def _send_news(self) -> None:
        if self._news or self._owes_a_sign():
            self._link.send(Turn(self._news, self._engine.load()))
            self._news, self._told_at = [], time.monotonic()

    def _owes_a_sign(self) -> bool:
        """Chunks of a long prompt bring no news, and silence looks like an engine that hangs."""
        return self._has_requests() and time.monotonic() - self._told_at >= SIGN_SECONDS

    # ---- the end

    def _drain(self, stop: Stop) -> None:
        deadline = time.monotonic() + stop.drain_seconds
        if self._deadline is None:
            log.info("Stopping: %d requests may end", len(self._handles))
            self._link.send(Draining())
        self._deadline = min(deadline, self._deadline or deadline)

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _is_over(self) -> bool:
        left = self._seconds_left()
        if left is None or (left > 0 and self._has_requests()):
            return False
        if self._has_requests():
            rest = [*self._handles, *self._entrance.request_ids]
            log.warning("Stopping: %d requests are aborted", len(rest))
            self._abort(rest, STOPPED)
            self._engine.settle()
        self._tell()
        return True

    def _has_requests(self) -> bool:
        return self._engine.has_work or not self._entrance.is_empty


def _delta(handle: RequestHandle, piece: Piece) -> Delta:
    finished = None
    if piece.finish_reason is not None:
        finished = Finished(piece.finish_reason, piece.stop_reason, piece.message)
    vector, routing = piece.embedding, piece.routed_experts
    return Delta(
        request_id=handle.request_id,
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=piece.logprobs,
        prompt_logprobs=piece.prompt_logprobs,
        finished=finished,
        prompt_tokens=len(handle.request.prompt_token_ids),
        cached_tokens=handle.cached_tokens,
        paths=handle.paths(piece.index) if finished else [],
        queue_seconds=handle.queue_seconds(piece.index) if finished else None,
        embedding=None if vector is None else vector.astype("<f4").tobytes(),
        hidden_states=None if piece.hidden_states is None else piece.hidden_states.packed,
        routed_experts=None if routing is None else routing.astype("<i4").tobytes(),
    )
