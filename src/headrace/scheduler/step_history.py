"""What the last steps were, and how long each path was at work; kept whether or not anybody looks.

A step costs two looks at a clock and one tuple.
"""

import time
from collections import deque
from typing import Any, NamedTuple

from headrace.base.decision import Refusal
from headrace.scheduler.launch import LaunchedStep

KEPT_STEPS = 512


class StepRecord(NamedTuple):
    """One step whose results have come.

    Attributes:
        number: counts launched steps from 1. launched: seconds of `time.perf_counter`.
        seconds: see `StepHistory`.
        refused: better paths, and why they did not run it.
        sequences: rows. prompt_tokens, decode_tokens: their new tokens, of prompts and sampled.
        bucket_tokens, bucket_sequences: what the path padded them to; 0: any number.
    """

    number: int
    launched: float
    seconds: float
    path: str
    refused: tuple[Refusal, ...]
    sequences: int
    prompt_tokens: int
    decode_tokens: int
    bucket_tokens: int
    bucket_sequences: int


class StepHistory:
    """The last steps, and seconds by path since the start.

    The seconds of a step are wall time on the host: from its launch, or from the results of the
    step before it where these came later, to its own results. So no moment is counted twice, and
    the sum over all paths is the time in which the engine had a step under way. With overlap the
    host looks for results only after it has launched the next step, so that a launch that takes
    longer than the device's work before it shows in the step before it. Taking in the results
    (text, logprobs, endings) is not part of them.
    """

    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self.path_seconds: dict[str, float] = {}
        self._records: deque[StepRecord] = deque(maxlen=kept)
        self._last_results = 0.0

    def take(self, step: LaunchedStep) -> None:
        """A step's results are here."""
        result = step.result
        # Without a device of its own the results were there when the launch returned.
        now = step.returned if result.was_immediate else time.perf_counter()
        seconds = max(0.0, now - max(step.launched, self._last_results))
        self._last_results = max(now, self._last_results)
        self.path_seconds[result.path] = self.path_seconds.get(result.path, 0.0) + seconds
        self._records.append(
            StepRecord(
                step.number,
                step.launched,
                seconds,
                result.path,
                result.refused,
                len(step.work.shares),
                step.work.prompt_tokens,
                step.work.decode_tokens,
                result.bucket.tokens,
                result.bucket.sequences,
            )
        )

    def since(self, number: int) -> list[StepRecord]:
        """Records of steps after `number`, oldest first."""
        found = []
        for record in reversed(self._records):
            if record.number <= number:
                break
            found.append(record)
        return found[::-1]

    def as_dict(self, after: int = 0) -> dict[str, Any]:
        """Those after step `after` in plain types: `fields` names the columns of `steps`.

        `at` is wall clock; `refused` is a place in `reasons`, each of which lists the refused paths
        as (path, reason, remedy).
        """
        records = self.since(after)
        offset = time.time() - time.perf_counter()
        reasons: dict[tuple[Refusal, ...], int] = {}
        rows = []
        for record in records:
            rows.append(
                (
                    record.number,
                    record.launched + offset,
                    record.seconds,
                    record.path,
                    reasons.setdefault(record.refused, len(reasons)),
                    *record[5:],
                )
            )
        names = ("number", "at", *StepRecord._fields[2:])
        told = [[(each.subject, each.reason, each.remedy) for each in why] for why in reasons]
        return {"fields": names, "reasons": told, "steps": rows}
