"""A span for each request, for an OpenTelemetry collector. The only file that needs its package.

Names of attributes are those of OpenTelemetry's conventions for generative AI; latencies have the
names that vLLM and SGLang gave them. Texts are in none of them.
"""

from typing import Any
from urllib.parse import urlsplit

from headrace.base.errors import ConfigError, UnsupportedError
from headrace.serving.records import RequestRecord
from headrace.version import __version__

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

REMEDY = "pip install 'headrace[otel]'"
EXPORT_SECONDS = 2  # a collector that does not answer holds the end of the server up so long
_PATH = "/v1/traces"
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


class Tracing:
    """An observer of the service.

    Args:
        provider: makes the tracer, and sends the spans; ended by `close`.
        model: the name that requests know.
    """

    def __init__(self, provider: Any, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("headrace", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, model: str) -> "Tracing":
        """Send to the collector at this URL, as protobuf over HTTP.

        Raises:
            UnsupportedError: the package is not there. ConfigError: that is no URL.
        """
        if not IS_INSTALLED:
            raise UnsupportedError(
                "otlp_traces_endpoint needs OpenTelemetry's SDK and exporter", remedy=REMEDY
            )
        place = urlsplit(endpoint)
        if place.scheme not in ("http", "https") or not place.netloc:
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r}",
                remedy="Give the collector's URL for HTTP, such as http://localhost:4318",
            )
        url = endpoint if place.path.strip("/") else endpoint.rstrip("/") + _PATH
        provider = TracerProvider(resource=Resource.create({"service.name": "headrace"}))
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, model)

    def observe(self, record: RequestRecord) -> None:
        """Make the span of a request that ended; a thread of the package's own sends it."""
        operation = _OPERATIONS.get(record.route, "chat")
        began = int(record.at * 1e9)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract({"traceparent": record.trace_parent}),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, operation, self._model),
            start_time=began,
        )
        if "error" in record.finishes:
            span.set_status(StatusCode.ERROR)
        span.end(end_time=began + int((record.seconds or 0.0) * 1e9))

    def close(self) -> None:
        """Send what is left; waits for the collector, for a while."""
        self._provider.shutdown()


def _attributes(record: RequestRecord, operation: str, model: str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": tuple(record.finishes),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.latency.time_to_first_token": record.seconds_to_first_token,
        "gen_ai.latency.time_in_queue": record.queue_seconds,
        "gen_ai.latency.e2e": record.seconds,
        "http.route": record.route,
        "headrace.stream": record.streams,
        "headrace.paths": tuple(
            f"{path}:{count}" for runs in record.paths.values() for path, count in runs
        ),
        **{f"gen_ai.request.{name}": value for name, value in record.asked.items()},
    }
    return {name: value for name, value in told.items() if value is not None}
