"""The line in the log: when it comes, and that its figures are true. And what a step leaves."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_engine import make_engine

from headrace.engine.engine import Engine
from headrace.engine.explanation import uncovered_decode
from headrace.engine.process.controls import Controls
from headrace.engine.process.pulse import Pulse
from headrace.request.messages import Control
from headrace.request.sampling_params import SamplingParams


def work(engine: Engine, pulse: Pulse, clock: list[float], tokens: int, prompt: int = 20) -> None:
    """Run a request; every step takes a second."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.add([1 + number % 200 for number in range(prompt)], params)
    while engine.has_work:
        pulse.before_step()
        engine.step()
        clock[0] += 1.0
        pulse.after_step()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="headrace.engine.process.pulse")
    return lambda: [record.message for record in caplog.records if "tok/s" in record.message]


def test_a_line_every_ten_seconds_of_work_and_none_when_idle(llama_folder: Path, lines) -> None:
    engine, clock = make_engine(llama_folder), [100.0]
    pulse = Pulse(engine, seconds=10.0, clock=lambda: clock[0])
    work(engine, pulse, clock, tokens=25)
    first, second = lines()
    assert "running 1, waiting 0" in first
    assert "prompt 2.0 tok/s (0 % cached), output 1.0 tok/s, steps eager:10 in 10.0 s" in first
    assert "prompt 0.0 tok/s" in second
    clock[0] += 3600.0
    assert len(lines()) == 2


def test_a_short_burst_has_its_line_at_its_end_but_not_each_of_many(
    llama_folder: Path, lines
) -> None:
    engine, clock = make_engine(llama_folder, enable_prefix_cache=True), [0.0]
    pulse = Pulse(engine, seconds=10.0, clock=lambda: clock[0])
    work(engine, pulse, clock, tokens=3)
    (line,) = lines()
    assert "running 0, waiting 0, KV 0.0 %" in line
    assert "output 1.0 tok/s, steps eager:3 in 3.0 s" in line
    for _ in range(3):  # within ten seconds of that line
        work(engine, pulse, clock, tokens=2)
    assert len(lines()) == 1
    clock[0] += 100.0  # idle time is not averaged over
    work(engine, pulse, clock, tokens=2)
    latest = lines()[-1]
    assert "output 1.0 tok/s, steps eager:8 in 8.0 s" in latest
    assert float(re.search(r"\((\d+) % cached\)", latest)[1]) == 80  # 16 of 20 tokens: a page


def test_steps_and_times_are_told(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, page_size=16)
    handle = engine.add([5] * 40, SamplingParams(max_tokens=6, ignore_eos=True))
    assert handle.queue_seconds(0) is None
    while not handle.is_finished:
        engine.step()
    assert 0 <= handle.queue_seconds(0) < 60
    told = Controls(engine).reply(Control(1, "steps", {"after": 0})).result
    rows = [dict(zip(told["fields"], row, strict=True)) for row in told["steps"]]
    assert [(row["prompt_tokens"], row["decode_tokens"]) for row in rows] == [
        (40, 0),
        *[(0, 1)] * 5,
    ]
    assert [row["number"] for row in rows] == list(range(1, 7))
    assert {row["path"] for row in rows} == {"eager"}
    (why,) = told["reasons"]
    assert {subject for subject, _, _ in why} == {"decode_graph", "prefill_graph", "cpu_graph"}
    assert all(reason for _, reason, _ in why)
    explained = Controls(engine).reply(Control(2, "explain", {})).result
    assert explained["steps"]["steps"][-1][0] == 6
    stats = engine.stats()
    assert stats["path_seconds"]["eager"] == pytest.approx(sum(row["seconds"] for row in rows))
    assert sum(entry["steps"] for entry in stats["paths"]) == 6
    load = engine.load()
    assert (load.prompt_tokens, load.output_tokens, load.running) == (40, 6, 0)
    assert load.kv_usage == 0.0  # only the prefix cache holds pages
    assert load.pages_cached == load.pages_evictable > 0


@pytest.mark.parametrize("sizes", ["off", (1, 2, 16), (1, 2, 8)])
def test_decode_steps_without_a_graph_are_warned_of(llama_folder: Path, sizes) -> None:
    # The largest graph was smaller than the largest batch, without a word
    plan = make_engine(llama_folder).settled.plan  # up to 16 sequences
    warning = uncovered_decode(replace(plan, decode_graph=replace(plan.decode_graph, value=sizes)))
    assert (
        warning.startswith("Decode steps of more than 8") if sizes == (1, 2, 8) else warning == ""
    )
