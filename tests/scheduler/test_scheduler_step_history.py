"""Seconds by path and the last steps, over steps that say when they began and ended."""

from dataclasses import dataclass
from typing import Any

import pytest

from headrace.base.decision import Refusal
from headrace.batch.facts import Bucket
from headrace.scheduler import step_history
from headrace.scheduler.step_history import StepHistory

BUCKET = Bucket(tokens=8, sequences=4)
WHY = (Refusal(subject="decode_graph", reason="the step holds prompt tokens", remedy="none"),)


@dataclass
class Result:
    path: str
    was_immediate: bool = False
    refused: tuple[Refusal, ...] = ()
    bucket: Bucket = BUCKET


@dataclass(frozen=True)
class Work:
    prompt_tokens: int = 3
    decode_tokens: int = 2
    shares: tuple[int, ...] = (1, 2)


@dataclass
class Step:
    number: int
    launched: float
    returned: float
    result: Result
    work: Work = Work()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(step_history.time, "perf_counter", lambda: now[0])
    return now


def take(history: StepHistory, step: Any) -> None:
    history.take(step)


def test_no_moment_counts_twice_with_overlap(clock: list[float]) -> None:
    history = StepHistory()
    # Launched at 1, 2, 4, 6; each is looked for after the next launch: at 3, 5, 7 and 9.
    steps = [Step(n + 1, at, at + 0.5, Result("graph")) for n, at in enumerate((1.0, 2.0, 4.0, 6))]
    steps[1].result.path = "eager"
    for step, results in zip(steps, (3.0, 5.0, 7.0, 9.0), strict=True):
        clock[0] = results
        take(history, step)
    assert [record.seconds for record in history.since(0)] == [2.0, 2.0, 2.0, 2.0]
    assert history.path_seconds == {"graph": 6.0, "eager": 2.0}  # 8 s of 8 s


def test_idle_time_does_not_count(clock: list[float]) -> None:
    history = StepHistory()
    for launched in (10.0, 20.0):
        clock[0] = launched + 1.5
        take(history, Step(1, launched, launched + 1.0, Result("eager")))
    assert history.path_seconds == {"eager": 3.0}


def test_without_a_device_of_its_own_a_step_ends_with_its_launch(clock: list[float]) -> None:
    history = StepHistory()
    for number, (launched, returned) in enumerate(((0.0, 3.0), (3.0, 4.0)), 1):
        clock[0] = returned + 5.0  # looked at late: the next launch came between
        take(history, Step(number, launched, returned, Result("eager", was_immediate=True)))
    assert [record.seconds for record in history.since(0)] == [3.0, 1.0]


def test_the_last_steps_are_kept_and_told_from_a_number_on() -> None:
    history = StepHistory(kept=4)
    for number in range(1, 8):
        refused = WHY if number % 2 else ()
        take(history, Step(number, number, number + 1, Result("eager", refused=refused)))
    told = history.as_dict()
    numbers = [row[told["fields"].index("number")] for row in told["steps"]]
    assert numbers == [4, 5, 6, 7]
    assert told["reasons"] == [
        [],
        [("decode_graph", "the step holds prompt tokens", "none")],
    ]
    row = dict(zip(told["fields"], history.as_dict(after=6)["steps"][0], strict=True))
    expected = {"number": 7, "path": "eager", "sequences": 2, "refused": 0}
    expected |= {"prompt_tokens": 3, "decode_tokens": 2, "bucket_tokens": 8, "bucket_sequences": 4}
    assert {name: row[name] for name in expected} == expected
    assert history.as_dict(after=7)["steps"] == []
