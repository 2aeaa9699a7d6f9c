"""The status page's figures, and what the page itself may do. How it looks: test_serving_page."""

import base64
import hashlib
import re

import msgspec
import pytest
from starlette.testclient import TestClient

from headrace.request.messages import Load
from headrace.serving.app import make_app
from headrace.serving.observability.history import HIT_SECONDS, LATENCY_SECONDS, SECONDS, History
from headrace.serving.observability.measures import Measures


def rows(part: dict) -> list[dict]:
    return [dict(zip(part["fields"], row, strict=True)) for row in part["rows"]]


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


@pytest.fixture
def history(clock: list[float]) -> History:
    return History(Measures(), clock=lambda: clock[0])


def test_a_sample_tells_what_changed(engine, history, clock) -> None:
    engine.load = Load(running=2, waiting=1, pages_total=10, pages_free=4, pages_cached=3)
    clock[0] += 1.0
    history.take(engine)
    clock[0] += 1.0
    engine.load = Load(
        **(msgspec.structs.asdict(engine.load) | {"prompt_tokens": 100, "cached_tokens": 25}),
    )
    sample = history.take(engine)
    assert sample.prompt_rate == 50.0
    assert (sample.running, sample.waiting, sample.output_rate) == (2, 1, 0)
    assert (sample.kv_usage, sample.kv_cached, sample.hit_rate) == (0.6, 0.3, 0.25)
    assert sample.first_token_p50 is None
    rates = []
    for _ in range(HIT_SECONDS):
        clock[0] += 1.0
        rates.append(history.take(engine))
    assert [sample.prompt_rate for sample in rates[:3]] == [100 / 3, 100 / 3, 0.0]
    assert rates[-2].hit_rate == 0.25
    assert rates[-1].hit_rate is None


def test_an_engine_that_starts_again_counts_from_nothing(engine, history, clock) -> None:
    for tokens in (500, 0, 20):  # alive, dead, alive again
        engine.load = Load(prompt_tokens=tokens, output_tokens=tokens)
        clock[0] += 1.0
        sample = history.take(engine)
        assert sample.output_rate == (500, 0, 10)[(500, 0, 20).index(tokens)]
    clock[0] += 1.0
    assert history.take(None).output_rate == 0


def test_latencies_are_of_the_last_seconds(engine) -> None:
    measures = Measures()
    history = History(measures)
    measures.first_token.observe(2.0)
    for _ in range(LATENCY_SECONDS):
        assert history.take(engine).first_token_p95 == pytest.approx(2.0, rel=0.13)
    assert history.take(engine).first_token_p95 is None


def test_samples_are_bounded_and_told_once(http, engine, service) -> None:
    for _ in range(SECONDS + 20):
        service.history.take(engine)
    told = http.get("/status.json").json()
    assert len(told["samples"]["rows"]) == SECONDS
    last = rows(told["samples"])[-1]["number"]
    service.history.take(engine)
    told = http.get("/status.json", params={"sample": last, "step": told["steps"]["last"]}).json()
    assert [each["number"] for each in rows(told["samples"])] == [last + 1]
    assert told["steps"]["rows"] == []


def test_steps_are_told_once_with_their_reasons(http, engine) -> None:
    told = http.get("/status.json").json()
    eager, graph = rows(told["steps"])
    assert (eager["path"], graph["path"]) == ("eager", "decode_graph")
    why = [["decode_graph", "the step holds prompt tokens", ""]]
    assert told["steps"]["reasons"][eager["refused"]] == why
    assert told["steps"]["reasons"][graph["refused"]] == []
    assert (eager["prompt_tokens"], eager["decode_tokens"], eager["bucket_tokens"]) == (17, 1, 18)
    assert told["steps"]["are_new"] is True
    again = http.get("/status.json", params={"step": told["steps"]["last"]}).json()
    assert again["steps"]["rows"] == []
    assert engine.controls == [("steps", {"after": 0}), ("steps", {"after": 2})]
    # Another engine counts from 1 again; the page's cursor goes on.
    engine.info = msgspec.structs.replace(engine.info, pid=77)
    after = http.get("/status.json", params={"step": told["steps"]["last"]}).json()
    assert [each["number"] for each in rows(after["steps"])] == [1, 2]
    assert after["steps"]["last"] == told["steps"]["last"] + 2


def test_a_dead_engine_leaves_what_was_known(http, engine, service) -> None:
    http.get("/status.json")
    engine.state, engine.death = "dead", "killed"
    told = http.get("/status.json").json()
    assert (told["state"], told["trouble"]) == ("dead", "killed")
    assert len(told["steps"]["rows"]) == 2
    assert told["steps"]["are_new"] is False
    service.engine = None
    told = http.get("/status.json").json()
    assert (told["state"], told["engine"]) == ("starting", None)


def test_the_page_is_open_and_its_figures_are_not(make_service) -> None:
    with TestClient(make_app(make_service(api_key="right"))) as http:
        assert http.get("/").status_code == 200
        assert http.get("/status.json").status_code == 401
        key = {"authorization": "Bearer right"}
        assert "right" not in http.get("/status.json", headers=key).text


@pytest.mark.parametrize("query", ["sample=-1", "step=x", "step=" + "9" * 5000])
def test_a_bad_cursor_is_refused(http, query: str) -> None:
    assert http.get("/status.json?" + query).status_code == 400


def test_the_page_may_do_what_its_own_script_says_and_no_more(http) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    # Nothing comes from elsewhere, and no markup is made of what others wrote.
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", answer.text) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", answer.text)
    assert not re.search(r"localStorage|sessionStorage|document\.cookie", answer.text)
