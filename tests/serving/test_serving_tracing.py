"""A span a request: what it says, whose trace it belongs to, and a collector that hears of it."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from headrace.base.errors import ConfigError, UnsupportedError
from headrace.request.outcome import Finished
from headrace.serving.app import make_app
from headrace.serving.observability import tracing
from headrace.serving.observability.tracing import Tracing
from headrace.serving.records import RequestRecord
from headrace.serving.service import Service

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "IS_INSTALLED", False)
    with pytest.raises(UnsupportedError, match=r"headrace\[otel\]"):
        Tracing.to("http://localhost:4318", "tiny")


def test_the_record_knows_what_a_span_says(service: Service, engine: FakeEngine) -> None:
    """Without the package, too: the trace that a request belongs to, and its options."""
    seen: list[RequestRecord] = []
    service.observers.append(seen.append)
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 0.5}
    with TestClient(make_app(service)) as http:
        parent = f"00-{TRACE}-{SPAN}-01"
        http.post("/v1/completions", json=body, headers={"traceparent": parent})
        http.post("/v1/completions", json=body)
    first, second = seen
    assert (first.trace_parent, second.trace_parent) == (parent, "")
    assert first.asked == {"max_tokens": 9, "temperature": 0.5, "top_p": 1.0}


@pytest.fixture
def spans() -> tuple[Tracing, Any]:
    pytest.importorskip("opentelemetry.sdk")
    if not tracing.IS_INSTALLED:
        pytest.skip("the exporter is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider, "tiny"), exporter


def test_what_a_span_says(spans, make_service: Callable[..., Service], engine: FakeEngine) -> None:
    traced, exporter = spans
    service = make_service()
    service.observers.append(traced.observe)
    with TestClient(make_app(service)) as http:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        body = {"prompt": "Hello", "max_tokens": 9}
        reply = http.post("/v1/completions", json=body, headers=headers).json()
        engine.finished = Finished("error", message="broke")
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    first, second = exporter.get_finished_spans()
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == SPAN
    assert (first.name, second.name) == ("text_completion tiny", "chat tiny")
    told = dict(first.attributes)
    assert told["gen_ai.response.id"] == reply["id"]
    assert told["gen_ai.usage.input_tokens"] == 5
    assert told["gen_ai.usage.output_tokens"] == 9
    assert told["gen_ai.request.max_tokens"] == 9
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert first.end_time > first.start_time
    assert second.parent is None
    assert (first.status.is_ok, second.status.is_ok) == (True, False)
    assert not [name for name in told if "Hello" in str(told[name])]


def test_a_collector_hears_of_it(spans) -> None:
    heard: list[tuple[str, str]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            heard.append((self.path, self.headers["content-type"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        traced = Tracing.to(f"http://127.0.0.1:{server.server_port}", "tiny")
        record = RequestRecord(id="x", route="/generate")
        record.ended = record.started
        traced.observe(record)
        traced.close()
        server.shutdown()
    assert heard == [("/v1/traces", "application/x-protobuf")]
    with pytest.raises(ConfigError, match="localhost:4318"):
        Tracing.to("localhost:4317", "tiny")
