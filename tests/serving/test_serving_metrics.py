"""/metrics: what is measured, under which name, and that nothing keeps a scrape from its answer."""

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from headrace.base.errors import EngineDeadError
from headrace.request.messages import Load
from headrace.request.outcome import Finished
from headrace.serving.app import make_app
from headrace.serving.observability import prometheus
from headrace.serving.observability.families import MOST_REASONS, OTHERS
from headrace.serving.observability.histogram import FINE_SECONDS, Histogram
from headrace.serving.records import RequestRecord
from headrace.serving.routes import metrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
LOAD = Load(
    running=3,
    waiting=2,
    pages_total=100,
    pages_free=40,
    pages_cached=50,
    pages_evictable=35,
    prompt_tokens=1000,
    cached_tokens=250,
    output_tokens=700,
    retractions=4,
    kv_canary_violations=7,
)


def scrape(http: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith("headrace:"):
                assert labels.pop("model_name") == "tiny", sample
            values[sample.name, tuple(sorted(labels.items()))] = sample.value
    return values


def of(values: dict, name: str, **labels: str) -> float:
    return values[f"headrace:{name}", tuple(sorted(labels.items()))]


def test_the_engines_figures(http, engine) -> None:
    engine.load = LOAD
    told = scrape(http)
    expected = {
        "up": 1,
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,  # what only the prefix cache holds is not in use
        "kv_used_tokens": 400,
        "kv_evictable_tokens": 560,
        "kv_available_tokens": 640,
        "max_total_num_tokens": 1600,
        "cache_hit_rate": 0.25,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": 700,
        "prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 250,
        "num_preemptions_total": 4,
        "kv_canary_violations_total": 7,
        "computed_prompt_tokens_total": 30,
        "failed_steps_total": 0,
        "startup_time_seconds": 1.5,
    }
    assert {name: of(told, name) for name in expected} == expected
    because = "decode_graph: the step holds prompt tokens"
    assert of(told, "forward_total", path="decode_graph", refused="") == 9
    assert of(told, "forward_total", path="eager", refused=because) == 3
    assert of(told, "forward_seconds_total", path="eager") == 0.25
    assert told["process_resident_memory_bytes", ()] > 1e6


def test_what_a_request_went_through(http, engine) -> None:
    engine.words, engine.pause = ["a", "bc", "d"], 0.03
    http.post("/v1/completions", json={"prompt": "hello", "n": 2})
    engine.finished = Finished("length")
    http.post("/v1/completions", json={"prompt": "hello", "stream": True})
    told = scrape(http)
    assert of(told, "request_success_total", finished_reason="stop") == 2
    assert of(told, "request_success_total", finished_reason="length") == 1
    assert of(told, "time_to_first_token_seconds_count") == 2
    assert of(told, "inter_token_latency_seconds_count") == 3 * 3  # 2 + 1 tokens after the first
    between = of(told, "inter_token_latency_seconds_sum")
    assert 3 * 0.03 < between < of(told, "e2e_request_latency_seconds_sum") * 2
    assert of(told, "request_prompt_tokens_sum") == 10
    assert of(told, "request_generation_tokens_sum") == 12
    buckets = [
        value
        for (name, labels), value in told.items()
        if name == "headrace:inter_token_latency_seconds_bucket" and dict(labels)["le"] != "+Inf"
    ]
    assert buckets == sorted(buckets)
    assert buckets[0] == 0  # none within a millisecond
    assert buckets[-1] == 9


def test_endings_that_are_no_answers(http, engine, service) -> None:
    engine.fail_after = 1
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 500
    told = scrape(http)
    assert of(told, "request_success_total", finished_reason="error") == 1
    assert of(told, "e2e_request_latency_seconds_count") == 0
    service.end(RequestRecord(id="x", route="/generate", finishes=["a new reason"]))
    assert of(scrape(http), "request_success_total", finished_reason="error") == 2


def test_time_in_the_queue_is_that_of_the_first_sequence() -> None:
    record = RequestRecord(id="x", route="/generate")
    for seconds in (None, 0.3, 0.0, 0.2):
        record.queued(seconds)
    assert record.queue_seconds == 0.0


def test_a_dead_engine_is_told(http, engine) -> None:
    engine.load = LOAD
    scrape(http)
    engine.state, engine.load, engine.restarts = "dead", Load(), 2
    engine.control_error = EngineDeadError("dead")
    told = scrape(http)
    assert of(told, "up") == 0
    assert of(told, "engine_restarts_total") == 2
    assert of(told, "num_requests_running") == 0
    assert of(told, "forward_total", path="decode_graph", refused="") == 9  # as it last said
    assert [name for name, _ in engine.controls] == ["stats"]  # a dead one is not asked


def test_before_the_engine_is_there(http, service) -> None:
    service.engine = None
    told = scrape(http)
    assert of(told, "up") == 0
    assert not any(name.startswith("headrace:num_requests") for name, _ in told)


def test_a_busy_engine_holds_no_scrape_up(http, engine, monkeypatch) -> None:
    monkeypatch.setattr(metrics, "ENGINE_SECONDS", 0.05)
    engine.load = LOAD
    scrape(http)
    engine.control_hold = asyncio.Event()
    for _ in range(3):  # each would wait for ever
        told = scrape(http)
    assert len(engine.controls) == 2  # and it is asked once, however many scrapes come
    assert of(told, "num_requests_running") == 3
    assert of(told, "engine_figures_age_seconds") > 0.05
    http.portal.call(engine.control_hold.set)
    engine.replies["stats"]["failed_steps"] = 5
    assert of(scrape(http), "failed_steps_total") == 5  # the late reply counts


def test_reasons_are_bounded(http, engine) -> None:
    many = [{"path": "eager", "refused": f"why {n}", "steps": 1} for n in range(3 * MOST_REASONS)]
    engine.replies["stats"]["paths"] = many
    told = {labels: value for (name, labels), value in scrape(http).items() if "forward_t" in name}
    assert len(told) == MOST_REASONS + 1
    assert sum(told.values()) == 3 * MOST_REASONS
    assert told[("path", "eager"), ("refused", OTHERS)] == 2 * MOST_REASONS


def test_metrics_need_no_key(make_service) -> None:
    with TestClient(make_app(make_service(api_key="right"))) as http:
        assert http.get("/metrics").status_code == 200


def test_open_metrics_are_spoken_too(http) -> None:
    answer = http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_without_the_package(http, monkeypatch) -> None:
    monkeypatch.setattr(prometheus, "IS_INSTALLED", False)
    answer = http.get("/metrics")
    assert answer.status_code == 501
    assert "headrace[server]" in answer.json()["error"]["message"]


def test_two_servers_of_a_process_share_nothing(make_service) -> None:
    first, second = make_service(), make_service()
    first.end(RequestRecord(id="x", route="/generate", finishes=["stop"]))
    with TestClient(make_app(second)) as http:
        assert of(scrape(http), "request_success_total", finished_reason="stop") == 0


def test_the_document_lists_what_there_is(http, engine) -> None:
    text = http.get("/metrics").text
    told = set(re.findall(r"^# TYPE headrace:(\w+) ", text, re.MULTILINE))
    listed = set(re.findall(r"^\| `headrace:(\w+)", DOCUMENT.read_text(), re.MULTILINE))
    assert listed == told


SECONDS = st.lists(st.floats(2e-5, 900), min_size=1, max_size=60)


@given(SECONDS)
def test_buckets_count_what_is_not_above_them(values: list[float]) -> None:
    histogram = Histogram((0.01, 0.1, 1, 10), FINE_SECONDS)
    for value in values:
        histogram.observe(value)
    told = dict(histogram.buckets())
    assert told.pop(float("inf")) == len(values)
    for bound, count in told.items():
        assert count == sum(value <= bound for value in values)
    assert histogram.sum == pytest.approx(sum(values))


@given(SECONDS, SECONDS, st.sampled_from([0.05, 0.5, 0.95, 1.0]))
def test_quantiles_of_what_came_since(old: list[float], new: list[float], share: float) -> None:
    histogram = Histogram((), FINE_SECONDS)
    for value in old:
        histogram.observe(value)
    before = tuple(histogram.counts)
    assert histogram.quantile(share, before) is None
    for value in new:
        histogram.observe(value)
    exact = sorted(new)[max(0, -int(-share * len(new) // 1) - 1)]
    found = histogram.quantile(share, before)
    assert found == pytest.approx(exact, rel=0.13)


def test_infos_pid_may_change(http, engine) -> None:
    engine.info = msgspec.structs.replace(engine.info, pid=2**22 - 1)  # nobody has that one
    assert "headrace_engine_process" not in http.get("/metrics").text
