"""What is kept of a request for the log, metrics and `/explain`: counts, times, never its text."""

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from headrace.base.log import get_logger

log = get_logger(__name__)

TRACE_PARENT: ContextVar[str] = ContextVar("trace_parent", default="")
"""The header `traceparent` of the request that is being answered."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One HTTP request to the engine, all its prompts and choices together.

    Attributes:
        started, first_token, ended: seconds of the monotonic clock; `None` while it has not been.
        at: wall clock of its arrival.
        finishes: reason of each choice's ending, in order of the endings; "error" and
            "disconnect" for a request that got none.
        queue_seconds: in the engine's queue, of the sequence that ran first.
        paths: forward paths of its sequences, run-length, one list a choice.
        asked: options by their names, numbers only.
        trace_parent: what its sender's trace calls it, if there is one.
    """

    id: str
    route: str
    streams: bool = False
    at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_seconds: float | None = None
    finishes: list[str] = field(default_factory=list)
    paths: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    asked: Mapping[str, float | None] = field(default_factory=dict)
    trace_parent: str = field(default_factory=TRACE_PARENT.get)

    @property
    def seconds(self) -> float | None:
        """From its arrival to its end."""
        return None if self.ended is None else self.ended - self.started

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started

    def queued(self, seconds: float | None) -> None:
        """A sequence ended that was queued so long before its first step, if it came to one."""
        if seconds is not None and (self.queue_seconds is None or seconds < self.queue_seconds):
            self.queue_seconds = seconds

    def failed(self) -> None:
        """Note that it was answered with an error, once."""
        if "error" not in self.finishes:
            self.finishes.append("error")

    def as_dict(self) -> dict[str, object]:
        return {
            "id": self.id,
            "route": self.route,
            "stream": self.streams,
            "at": self.at,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "seconds": self.seconds,
            "seconds_to_first_token": self.seconds_to_first_token,
            "seconds_in_queue": self.queue_seconds,
            "finish_reasons": self.finishes,
            "paths": [
                {"choice": choice, "runs": [list(run) for run in runs]}
                for choice, runs in sorted(self.paths.items())
            ],
        }


def log_record(record: RequestRecord) -> None:
    """One line at info; an observer of the service when requests are logged."""
    first, total = record.seconds_to_first_token, record.seconds
    steps: dict[str, int] = {}
    for runs in record.paths.values():
        for path, count in runs:
            steps[path] = steps.get(path, 0) + count
    log.info(
        "%s %s prompt=%d cached=%d output=%d first=%s total=%s finish=%s paths=%s",
        record.id,
        record.route,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        "-" if first is None else f"{first:.3f}s",
        "-" if total is None else f"{total:.3f}s",
        ",".join(record.finishes) or "-",
        ",".join(f"{path}:{count}" for path, count in steps.items()) or "-",
    )
