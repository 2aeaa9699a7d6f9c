"""Faults that users of other servers met, asked of this one over HTTP with an engine behind it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from running_server import RunningServer
from sse import events_of

CONTEXT = 64
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(tiny_folder, "--context-length", str(CONTEXT), "--enable-admin")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=30) as made:
        yield made


def completion(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": "Hello", **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def spelled(http: httpx2.Client, ids: list[int]) -> str:
    fields = {"tokens": ids, "skip_special_tokens": False}
    return str(http.post("/detokenize", json=fields).json()["text"])


def all_is_free(http: httpx2.Client) -> bool:
    """Nothing runs and every page has its place."""
    load = http.get("/server_info").json()["internal_states"][0]
    held = load["pages_free"] + load["pages_cached"]
    return not load["running"] + load["waiting"] and held == load["pages_total"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1", "1e9", "999999", "-1e400"])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
)
@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_numbers_that_are_none_or_far_outside_are_refused(http, route, name, value) -> None:
    """A comparison lets NaN pass, and the sampler falls over it."""
    if name == "presence_penalty" and value == "-1":
        pytest.skip("a value in range")
    fields = f'"prompt": "a", "{name}": {value}'
    if route == "/generate":
        fields = f'"text": "a", "sampling_params": {{"{name}": {value}}}'
    headers = {"content-type": "application/json"}
    answer = http.post(route, content=f"{{{fields}}}".encode(), headers=headers)
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]["message"]
    assert http.get("/health_generate").status_code == 200


@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize("most", [None, 1, 5])
def test_a_prompt_at_the_edge_of_the_context_runs_or_is_refused(http, length, most) -> None:
    """One token below the limit ended the server; both numbers stand in the refusal."""
    fields = {"prompt": [5] * length, **GREEDY, **({} if most is None else {"max_tokens": most})}
    answer = http.post("/v1/completions", json=fields)
    room = CONTEXT - length
    if room < (most or 1):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]
        assert str(length) in error["message"]
    else:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == (most or room)


def test_who_leaves_a_stream_disturbs_nobody(http) -> None:
    """The next requests failed, and the check for lost pages ended the server."""
    for _ in range(5):
        fields = {"prompt": "Hello", "stream": True, "max_tokens": 50, **GREEDY}
        with http.stream("POST", "/v1/completions", json=fields) as answer:
            next(answer.iter_lines())
    assert len({completion(http, max_tokens=8)["choices"][0]["text"] for _ in range(3)}) == 1
    assert http.post("/flush_cache").status_code == 200
    assert all_is_free(http)


def test_an_abort_of_what_is_not_there_changes_nothing(http) -> None:
    """Unknown, ended, twice."""
    ended = completion(http, max_tokens=2)["id"]
    for name in ("nosuch", ended, ended):
        answer = http.post("/abort_request", json={"rid": name})
        assert (answer.status_code, answer.json()["aborted"]) == (200, [])
    fields = {"prompt": "Hello", "stream": True, "max_tokens": 50, "rid": "mine", **GREEDY}
    with http.stream("POST", "/v1/completions", json=fields) as answer:
        lines = answer.iter_lines()
        next(lines)
        for _ in range(2):
            assert http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert [reason for reason in reasons if reason] in (["abort"], ["length"])
    assert completion(http, max_tokens=2)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_cuts_text_ids_logprobs_and_usage_alike(http, include: bool, stream: bool) -> None:
    """The text was cut and the rest was not; a stop shown beside logprobs raised."""
    text = completion(http, max_tokens=30)["choices"][0]["text"]
    stop = text[10:13]
    expected = text[: text.index(stop) + len(stop) * include]
    fields = {
        "stop": [stop],
        "include_stop_str_in_output": include,
        "logprobs": 2,
        "max_tokens": 30,
        "return_token_ids": True,
        "stream": stream,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
        answer = http.post("/v1/completions", json={"prompt": "Hello", **GREEDY, **fields})
        events = events_of(answer.text)
    else:
        events = [completion(http, **fields)]
    choices = [event["choices"][0] for event in events if event["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    told = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "stop"
    assert len(ids) == len(told) == events[-1]["usage"]["completion_tokens"]
    assert stop in spelled(http, ids)
    assert stop not in spelled(http, ids[:-1])  # no token came behind the stop


def test_logprobs_come_or_are_refused_with_the_limit(http) -> None:
    """Asked for and silently not there."""
    logprobs = completion(http, logprobs=5, max_tokens=4)["choices"][0]["logprobs"]
    assert [len(entry) for entry in logprobs["top_logprobs"]] == [5] * 4
    answer = http.post("/v1/completions", json={"prompt": "a", "logprobs": 21})
    assert answer.status_code == 400
    assert "at most 20" in answer.json()["error"]["message"]


def test_what_works_is_not_warned_of(http, server: RunningServer) -> None:
    """A warning said that echo with logprobs is not supported."""
    before = len(server.lines)
    reply = completion(http, echo=True, logprobs=1, max_tokens=2)
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == len("Hello") + 2
    assert not [line for line in server.lines[before:] if "WARN" in line or "ERROR" in line]


def test_forwards_are_counted_without_being_asked_for(http) -> None:
    """A flag for such counts printed none. Why no graph ran is counted too."""
    for _ in range(3):
        completion(http, max_tokens=4)
    lines = [line for line in http.get("/metrics").text.splitlines() if "forward_total{" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) >= 12
    assert any('refused="' in line and "cpu_graph: " in line for line in lines)


@pytest.mark.parametrize("made", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_forbids_every_token_is_told_so(http, stream: bool, made: int) -> None:
    """Before its first token or in mid-answer, and never as a failure of the server."""
    banned = "a" if made == 0 else "c"
    fields = {"prompt": "Hello", "regex": "abc", "bad_words": [banned], "max_tokens": 9}
    answer = http.post("/v1/completions", json={**fields, "stream": stream})
    if stream:
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        *begun, error = events_of(answer.text)
        assert "".join(event["choices"][0]["text"] for event in begun) == "abc"[:made]
    else:
        assert answer.status_code == 400
        error = answer.json()
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["code"] == "no_token_left"
    assert "forbid every one" in error["error"]["message"]
    assert completion(http, max_tokens=2)["choices"]
    assert all_is_free(http)
