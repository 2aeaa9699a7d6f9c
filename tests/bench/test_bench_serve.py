"""`headrace bench serve` against a server whose delays the test gives."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from fake_openai import Behaviour, FakeOpenAI

from headrace.cli.main import main


def bench(server: FakeOpenAI, *flags: str) -> list[str]:
    return ["bench", "serve", "--base-url", f"{server.url}/v1", "--load-seed", "1", *flags]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_latencies_are_those_of_the_server(capsys, endpoint: str) -> None:
    asked = ["--endpoint", endpoint, "--num-prompts", "8", "--input-len", "12", "--json"]
    behaviour = Behaviour(first=0.15, gap=0.04, reasoning=2, cached=3)
    with FakeOpenAI(lambda number: behaviour) as server:
        assert main(bench(server, *asked, "--output-len", "6")) == 0
    (found,) = lines(capsys)
    assert (found["completed"], found["failed"], found["unfinished"]) == (8, 0, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (8 * 12, 8 * 6)
    assert found["cached_input_tokens"] == 8 * 3
    assert found["p99_e2el_ms"] <= 1000 * found["duration"]
    for name, share in (("ttft", 1), ("tpot", 5), ("itl", 1)):
        assert 0 < found[f"median_{name}_ms"] <= found["median_e2el_ms"] / share, name
    # What the server waits at least; a first token that is late leaves less for the gaps.
    for name, milliseconds in (("ttft", 150), ("e2el", 350)):
        assert min(found[f"{kind}_{name}_ms"] for kind in ("mean", "p90", "p99")) >= milliseconds
    after_the_first = found["mean_e2el_ms"] - found["mean_ttft_ms"]
    assert found["mean_tpot_ms"] == pytest.approx(after_the_first / 5)
    assert found["mean_itl_ms"] == pytest.approx(after_the_first / 5)
    assert found["output_throughput"] == pytest.approx(48 / found["duration"])
    assert found["max_concurrent_requests"] == server.peak == 8
    assert found["notes"] == []
    assert len(server.generations) == 9  # the warm-up too
    first = server.generations[0]
    assert first.body["stream_options"] == {"include_usage": True}
    assert first.body["ignore_eos"] is True
    assert first.body["model"] == "fake"
    prompts = [str(each.body.get("prompt", each.body.get("messages"))) for each in server.seen]
    assert len(set(prompts)) == 9
    is_ids = [isinstance(each.body.get("prompt"), list) for each in server.seen]
    assert set(is_ids) == {endpoint == "completions"}


def test_usage_is_absent(capsys) -> None:
    behaviour = Behaviour(usage=False, tokens_per_chunk=2)
    asked = ["--num-prompts", "3", "--input-len", "5", "--output-len", "8"]
    with FakeOpenAI(lambda number: behaviour) as server:
        assert main(bench(server, *asked, "--prompts", "text")) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Total generated tokens: +12\n", shown)  # chunks, two tokens each
    assert "note: 3 streams had no usage" in shown
    assert "note: the input tokens of 3 requests are unknown" in shown


def test_concurrency_is_limited_and_swept(capsys) -> None:
    asked = ["--num-prompts", "9", "--max-concurrency", "3,1,any", "--output-len", "2", "--json"]
    peaks = []
    with FakeOpenAI(lambda number: Behaviour(first=0.03)) as server:
        assert main(bench(server, *asked, "--warm-up", "0")) == 0
        for start in (0, 9, 18):
            peaks.append(max(each.running for each in server.generations[start : start + 9]) + 1)
    found = lines(capsys)
    assert [entry["max_concurrency"] for entry in found] == [3, 1, None]
    assert [entry["max_concurrent_requests"] for entry in found] == peaks == [3, 1, 9]
    # What waits here for its turn has no clock yet: at least five of nine take the median or more.
    assert found[1]["median_ttft_ms"] <= 1000 * found[1]["duration"] / 5
    assert found[1]["duration"] > 9 * 0.03


def test_requests_come_at_their_rate(capsys) -> None:
    asked = ["--num-prompts", "60", "--request-rate", "100", "--output-len", "1", "--json"]
    with FakeOpenAI() as server:
        assert main(bench(server, *asked, "--warm-up", "0")) == 0
    times = [each.at for each in server.generations]
    gaps = numpy.diff(times)
    assert lines(capsys)[0]["duration"] == pytest.approx(0.6, rel=0.5)
    assert gaps.mean() == pytest.approx(0.01, rel=0.5)
    assert gaps.std() > 0.4 * gaps.mean()  # and not in step


def test_failures_are_counted_and_shown(capsys) -> None:
    refusal = Behaviour(status=400, body='{"error": {"message": "prompt is bad"}}')
    kinds = {
        1: refusal,
        2: Behaviour(cut_after=2),
        3: Behaviour(error_after=1),
        4: refusal,
        5: Behaviour(short_by=1),
    }
    with FakeOpenAI(lambda number: kinds.get(number, Behaviour())) as server:
        assert main(bench(server, "--num-prompts", "6", "--max-concurrency", "1")) == 1
        assert main(bench(server, "--num-prompts", "1")) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Successful requests: +2\nFailed requests: +4\n", shown)
    assert "failed 2 times: HTTP 400: prompt is bad" in shown
    assert "failed 1 times: in the stream: a step failed" in shown
    assert "Payload" in shown  # how the client calls a stream that was cut
    assert "note: 1 answers are shorter than asked" in shown


def test_a_stream_that_ends_too_early_fails(capsys) -> None:
    """All is well to HTTP, but no finish_reason came."""
    with FakeOpenAI(lambda number: Behaviour(short_by=99)) as server:
        assert main(bench(server, "--num-prompts", "2", "--output-len", "9", "--warm-up", "0")) == 1
    assert (
        "failed 2 times: the stream ended without a finish_reason, after 0 chunks"
        in capsys.readouterr().out
    )


def test_a_slow_request_times_out(capsys) -> None:
    with FakeOpenAI(lambda number: Behaviour(first=5.0)) as server:
        asked = ["--num-prompts", "1", "--warm-up", "0", "--timeout", "1"]
        assert main(bench(server, *asked)) == 1
    assert "failed 1 times: timed out" in capsys.readouterr().out


def test_a_wrong_key_is_told_before_anything_is_measured(capsys) -> None:
    refusal = Behaviour(status=401, body='{"error": {"message": "no such key"}}')
    with FakeOpenAI(lambda number: refusal) as server:
        assert main(bench(server, "--num-prompts", "50")) == 2
        assert len(server.generations) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "A warm-up request failed. HTTP 401: no such key" in shown.err


def test_nobody_listens(capsys) -> None:
    with FakeOpenAI() as server:
        url = server.url
    assert main(["bench", "serve", "--base-url", url]) == 2
    told = capsys.readouterr().err
    assert f"{url} cannot be reached. Connect call failed" in told
    assert "ssl" not in told


def test_waiting_for_a_server_that_starts(capsys) -> None:
    with FakeOpenAI() as server:
        models = server.get.pop("/v1/models")
        assert main(bench(server, "--num-prompts", "1")) == 2
        assert "lists no model" in capsys.readouterr().err
        server.get["/v1/models"] = models
    holder: list[FakeOpenAI] = []

    def start_late() -> None:
        time.sleep(0.4)
        late = FakeOpenAI()
        late.port_wanted = server.port
        holder.append(late.__enter__())

    thread = threading.Thread(target=start_late)
    thread.start()
    try:
        assert main(bench(server, "--num-prompts", "1", "--wait", "20")) == 0
    finally:
        thread.join()
        holder[0].__exit__()


def test_ctrl_c_shows_what_was_measured(capsys) -> None:
    def press() -> None:
        while len(server.generations) < 5:  # two at a time: those before the last two have ended
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    slow = Behaviour(first=30.0)
    with FakeOpenAI(lambda number: Behaviour() if number < 3 else slow) as server:
        thread = threading.Thread(target=press)
        thread.start()
        asked = ["--num-prompts", "9", "--max-concurrency", "2,3", "--warm-up", "0"]
        assert main(bench(server, *asked)) == 130
        thread.join()
    shown = capsys.readouterr().out
    assert re.search(
        r"Successful requests: +3\nFailed requests: +0\nUnfinished requests: +6", shown
    )
    assert "note: interrupted" in shown
    assert "at most 3" not in shown  # no further run


def test_own_prompts_and_fields_of_the_body(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    file = tmp_path / "own.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4}\n' * 2)
    asked = ["--endpoint", "chat", "--prompt-file", str(file), "--warm-up", "0", "--no-ignore-eos"]
    extra = ["--extra-body", '{"top_p": 0.5}', "--temperature", "0.7", "--model", "other"]
    with FakeOpenAI() as server:
        assert main(bench(server, *asked, *extra)) == 0
    assert len(server.generations) == 2
    body = server.generations[0].body
    assert body["messages"] == [{"role": "user", "content": "a b"}]
    assert (body["max_tokens"], body["top_p"], body["temperature"]) == (4, 0.5, 0.7)
    assert body["model"] == "other"
    assert "ignore_eos" not in body
    assert server.generations[0].headers["authorization"] == "Bearer from the environment"


def test_ids_stay_below_the_vocabulary_of_the_server(capsys) -> None:
    with FakeOpenAI() as server:
        server.get["/model_info"] = {"vocab_size": 7}
        assert main(bench(server, "--num-prompts", "2")) == 0
        server.get["/model_info"] = {}
        assert main(bench(server, "--num-prompts", "2")) == 0
    largest = [max(each.body["prompt"]) for each in server.generations]
    assert max(largest[:3]) == 6
    assert max(largest[3:]) > 1000


def test_flushing_the_cache(capsys) -> None:
    with FakeOpenAI() as server:
        asked = bench(server, "--num-prompts", "1", "--flush-cache", "--max-concurrency", "1,2")
        assert main(asked) == 2
        assert "has no /flush_cache" in capsys.readouterr().err
        server.get["/flush_cache"] = {}
        server.seen.clear()
        assert main(asked) == 0
    assert [each.path for each in server.seen] == [
        "/v1/completions",
        *("/flush_cache", "/v1/completions") * 2,
    ]


def test_lines_in_a_file(tmp_path: Path, capsys) -> None:
    results = tmp_path / "out.jsonl"
    asked = ["--num-prompts", "4", "--output-len", "3", "--goodput", "ttft:5000,tpot:0.0001"]
    files = ["--output-file", str(results), "--output-details"]
    with FakeOpenAI(lambda number: Behaviour(gap=0.01)) as server:
        assert main(bench(server, *asked, *files)) == 0
        assert main(bench(server, *asked, *files, "--max-concurrency", "1,4")) == 0
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    assert [entry["max_concurrency"] for entry in entries] == [None, 1, 4]
    for entry in entries:
        assert entry["output_lens"] == [3] * 4
        assert [len(gaps) for gaps in entry["itls"]] == [2] * 4
        assert all(ttft > 0 for ttft in entry["ttfts"])
        assert entry["request_goodput"] == 0.0
        assert entry["request_rate"] == "inf"
    assert "Request goodput (req/s):" in capsys.readouterr().out


def test_pictures_of_one_run_and_of_several(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    asked = ["--num-prompts", "3", "--output-len", "3", "--plot", str(picture)]
    with FakeOpenAI() as server:
        assert main(bench(server, *asked)) == 0
        one_run = picture.read_bytes()
        assert main(bench(server, *asked, "--max-concurrency", "1,3")) == 0
        unknown = str(tmp_path / "out.unknown")
        assert main(bench(server, "--num-prompts", "1", "--plot", unknown)) == 2
    assert one_run.startswith(b"\x89PNG")
    assert picture.read_bytes() != one_run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output-file", "/missing/out.jsonl"], "/missing/out.jsonl cannot be written"),
        (["--output-file", "/"], "/ cannot be written"),
        (["--shared-prefix-len", "128"], "--shared-prefix-len is 128"),
        (["--endpoint", "chat", "--prompts", "ids"], "takes no token ids"),
        (["--extra-body", '{"n": 2}'], "has the field 'n'"),
    ],
)
def test_what_cannot_be_is_told_before_the_work(capsys, flags: list[str], message: str) -> None:
    with FakeOpenAI() as server:
        assert main(bench(server, *flags)) == 2
        assert not server.generations
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--request-rate", "0"),
        ("--request-rate", "fast"),
        ("--max-concurrency", "0"),
        ("--input-len", "9-3"),
        ("--goodput", "ttft"),
        ("--goodput", "speed:3"),
        ("--extra-body", "[1]"),
        ("--extra-body", "{"),
    ],
)
def test_flags_that_cannot_be_read(capsys, flag: str, value: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", flag, value])
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("package", ["aiohttp", "matplotlib.figure"])
def test_a_missing_package_is_told_with_its_remedy(capsys, monkeypatch, package: str) -> None:
    for name in [name for name in sys.modules if name.startswith("headrace.bench.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["bench", "serve", "--plot", "x.png"]) == 2
    assert "pip install 'headrace[bench]'" in capsys.readouterr().err


def test_no_torch_is_needed() -> None:
    script = (
        "import sys\nimport headrace.bench.serve.measure, headrace.cli.bench_serve\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.stdout == "False\n", answer.stderr
