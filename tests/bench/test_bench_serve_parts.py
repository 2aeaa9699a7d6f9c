"""Serving benchmark without a server: work, arrivals, events, records, the summary."""

import json
import math
from pathlib import Path

import numpy
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.serve.arrivals import arrivals
from headrace.bench.serve.client import Target, check_jobs
from headrace.bench.serve.record import Record
from headrace.bench.serve.run import Run
from headrace.bench.serve.stream import EventLines, error_of_body
from headrace.bench.serve.summary import Summary
from headrace.bench.serve.work import WORDS, Job, Lengths, RandomLoad, read_load


def load(**changes: object) -> RandomLoad:
    asked = {
        "num_prompts": 6,
        "input_len": Lengths(8, 16),
        "output_len": Lengths(3, 3),
        "vocab_size": 50,
        "seed": 1,
    }
    return RandomLoad(**{**asked, **changes})


def test_random_prompts_differ_by_run_and_keep_their_lengths() -> None:
    first, again, other = load().jobs(0), load().jobs(0), load().jobs(1)
    assert first == again
    assert [job.input_len for job in first] == [job.input_len for job in other]
    assert all(one.prompt != two.prompt for one, two in zip(first, other, strict=True))
    assert len({job.input_len for job in first}) > 1
    for job in first:
        assert len(job.prompt) == job.input_len
        assert 8 <= job.input_len <= 16
        assert all(0 <= token < 50 for token in job.prompt)
        assert job.output_len == 3


def test_prefixes_are_shared_within_groups_only() -> None:
    jobs = load(shared_prefix_len=7, prefix_groups=2).jobs(0)
    prefixes = [tuple(job.prompt[:7]) for job in jobs]
    assert prefixes[0] == prefixes[2] == prefixes[4]
    assert prefixes[1] == prefixes[3] == prefixes[5]
    assert prefixes[0] != prefixes[1]
    assert len({tuple(job.prompt) for job in jobs}) == 6
    with pytest.raises(ConfigError, match="from 0 to 7"):
        load(shared_prefix_len=8)


def test_words_instead_of_ids() -> None:
    for job in load(form="text").jobs(0):
        assert isinstance(job.prompt, str)
        assert 8 <= len(job.prompt.split()) <= 16
        assert set(job.prompt.split()) <= set(WORDS)
        assert job.input_len is None


def test_arrivals_are_poisson_and_seeded() -> None:
    times = arrivals(4000, 20.0, 3)
    assert times == arrivals(4000, 20.0, 3)
    assert times != arrivals(4000, 20.0, 4)
    gaps = numpy.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # an exponential's
    assert times[0] == 0.0
    assert arrivals(3, math.inf, 0) == [0.0] * 3


def test_own_prompts(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "Hello"}, {"prompt": [1, 2], "max_tokens": 5}, {"messages": chat}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    text, ids, messages = read_load(file, output_len=9, most=None).jobs(0)
    assert text == Job(prompt="Hello", input_len=None, output_len=9)
    assert ids == Job(prompt=[1, 2], input_len=2, output_len=5)
    assert messages.is_chat
    assert not ids.is_chat
    assert len(read_load(file, output_len=9, most=2).jobs(0)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no prompt"),
        ("Hello", "line 1 is no JSON"),
        ('{"text": "Hello"}', "neither"),
        ('{"prompt": []}', "neither"),
        ('{"prompt": [1, "a"]}', "neither"),
        ("[1]", "neither"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_load(file, output_len=9, most=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_load(tmp_path / "missing", output_len=9, most=None)


def test_a_prompt_must_go_with_the_endpoint() -> None:
    chat = Job(prompt=[{"role": "user", "content": "Hi"}], input_len=None, output_len=1)
    ids = Job(prompt=[1], input_len=1, output_len=1)
    with pytest.raises(ConfigError, match="takes no token ids"):
        check_jobs(Target(base_url="", endpoint="chat", model="m"), [chat, ids])
    with pytest.raises(ConfigError, match="takes no messages"):
        check_jobs(Target(base_url="", endpoint="completions", model="m"), [ids, chat])
    with pytest.raises(ConfigError, match="'stream'"):
        Target(base_url="", endpoint="chat", model="m", extra_body={"stream": False})


def test_events_cut_at_any_byte() -> None:
    text = 'data: {"a": "é"}\r\n\r\n: ping\n\nevent: x\ndata:[DONE]\n\n'.encode()
    for size in range(1, len(text) + 1):
        lines = EventLines()
        found = [
            payload
            for start in range(0, len(text), size)
            for payload in lines.feed(text[start : start + size])
        ]
        assert found == ['{"a": "é"}'.encode(), b"[DONE]"], size


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no  such\\nmodel", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "flat"}', "flat"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>", "<html>"),
        (b"", "no message"),
        (b'"' + b"x" * 900 + b'"', "x" * 199 + "…"),
    ],
)
def test_what_a_refusal_says(body: bytes, message: str) -> None:
    assert error_of_body(body) == message


def seen(*events: tuple[float, str], asked: int = 3, close: bool = True) -> Record:
    """A request sent at 10 s, with its events at these times."""
    record = Record(input_len=4, output_len=asked)
    record.begin(10.0)
    for now, payload in events:
        record.take(payload.encode(), now)
    if close:
        record.close(99.0)
    return record


TEXT = '{"choices": [{"text": "a"}]}'
EMPTY = '{"choices": [{"text": ""}]}'
LAST = '{"choices": [{"text": "", "finish_reason": "length"}]}'
USAGE = '{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}}'
ROLE = '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
THOUGHT = '{"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": null}]}'
CALL = '{"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}]}'


def test_times_of_a_completion() -> None:
    record = seen((10.5, EMPTY), (11.0, TEXT), (11.75, TEXT), (12.0, LAST), (13.0, USAGE))
    assert record.state == "done"
    assert (record.ttft, record.e2e, record.gaps) == (0.5, 2.0, [0.5, 0.75])
    assert (record.read, record.made, record.chunks) == (5, 6, 3)
    assert record.tpot == pytest.approx(1.5 / 5)


def test_the_role_is_no_token_and_thoughts_and_calls_are() -> None:
    record = seen((10.1, ROLE), (10.5, THOUGHT), (11.0, CALL), (11.0, "[DONE]"))
    assert (record.ttft, record.gaps, record.made, record.read) == (0.5, [0.5], 2, 4)
    assert record.state == "done"


def test_an_answer_without_text_has_a_first_token_at_its_end() -> None:
    record = seen((10.1, ROLE), (12.0, '{"choices": [{"delta": {}, "finish_reason": "stop"}]}'))
    assert (record.state, record.ttft, record.e2e, record.tpot) == ("done", 2.0, 2.0, None)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([], "without a finish_reason, after 0"),
        ([(10.5, TEXT), (11.0, "[DONE]")], "without a finish_reason, after 1"),
        ([(10.5, TEXT), (11.0, '{"error": {"message": "broke"}}')], "in the stream: broke"),
        ([(10.5, "{"), (11.0, LAST)], "cannot be read"),
        ([(10.5, '{"choices": [{"text": "", "finish_reason": "abort"}]}')], "finish_reason is ab"),
    ],
)
def test_streams_that_fail(events: list[tuple[float, str]], error: str) -> None:
    record = seen(*events)
    assert record.state == "failed"
    assert error in record.error


def test_a_summary() -> None:
    whole = seen((11.0, TEXT), (12.0, TEXT), (12.0, LAST), (12.0, USAGE), asked=6)
    uncounted = seen((10.5, TEXT), (10.75, TEXT), (11.0, TEXT), (11.0, LAST), asked=9)
    failed = seen((10.5, TEXT), asked=3)
    failed.ended = 10.25
    waiting = Record(input_len=4, output_len=3)
    run = Run(
        records=[whole, uncounted, failed, waiting],
        began=10.0,
        seconds=4.0,
        client_load=0.9,
        was_interrupted=True,
    )
    found = Summary.of(run, {"ttft": 600.0})
    assert (found.successful, found.failed, found.unfinished) == (2, 1, 1)
    assert (found.input_tokens, found.output_tokens) == (5 + 4, 6 + 3)
    assert found.cached_tokens is None
    assert found.peak_concurrency == 3
    assert found.mean_concurrency == pytest.approx((2.0 + 1.0 + 0.25) / 4)
    assert found.output_throughput == pytest.approx(9 / 4)
    assert found.total_throughput == pytest.approx(18 / 4)
    assert found.latencies["ttft"].mean == pytest.approx(750.0)
    assert found.latencies["ttft"].p90 == pytest.approx(950.0)
    assert found.latencies["tpot"].mean == pytest.approx((1000 / 5 + 500 / 2) / 2)
    assert found.latencies["itl"].median == pytest.approx(250.0)
    assert found.good == 1
    assert found.errors == [("the stream ended without a finish_reason, after 1 chunks", 1)]
    notes = " / ".join(found.notes)
    for part in (
        "interrupted",
        "1 streams had no usage",
        "1 answers are shorter",
        "several tokens",
    ):
        assert part in notes
    assert "load generator was busy" in notes
    entry = json.loads(json.dumps(found.as_dict()))
    assert entry["median_e2el_ms"] == pytest.approx(1500.0)
    assert entry["request_goodput"] == pytest.approx(0.25)


def test_a_summary_of_nothing() -> None:
    run = Run(records=[], began=0.0, seconds=1.0, client_load=0.0, was_interrupted=False)
    found = Summary.of(run)
    assert found.latencies["ttft"] is None
    assert "P99 TTFT (ms):                           -" in found.table()
    assert found.as_dict()["p99_ttft_ms"] is None
