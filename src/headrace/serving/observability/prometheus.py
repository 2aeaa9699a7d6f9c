"""The text that Prometheus scrapes. The only file that needs prometheus-client."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.serving.errors import ApiError
from headrace.serving.observability.families import PREFIX, Distribution, Family

try:
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError:
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

REMEDY = "pip install 'headrace[server]'"


def exposition(
    families: Iterable[Family],
    distributions: Iterable[Distribution],
    *,
    model_name: str,
    engine_pid: Callable[[], int] | None,
    accept: str,
) -> tuple[bytes, str]:
    """(body, content type) in the form that `accept` prefers.

    Args:
        engine_pid: of the engine's process, for its memory and CPU time beside our own.

    Raises:
        ApiError: 501 without prometheus-client.
    """
    if not IS_INSTALLED:
        raise ApiError(501, f"/metrics needs prometheus-client: {REMEDY}", code="not_installed")
    registry = CollectorRegistry()  # a new one each time: nothing is kept between scrapes
    registry.register(_Told(model_name, families, distributions))
    ProcessCollector(registry=registry)
    if engine_pid is not None:
        ProcessCollector(namespace="headrace_engine", pid=engine_pid, registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


if IS_INSTALLED:

    class _Told(Collector):
        """Our figures in the client's own types, each with the label `model_name`."""

        def __init__(
            self,
            model_name: str,
            families: Iterable[Family],
            distributions: Iterable[Distribution],
        ) -> None:
            self._model_name = model_name
            self._families, self._distributions = families, distributions

        def describe(self) -> Iterator[Metric]:
            return iter(())  # names need no check against others: they are all here

        def collect(self) -> Iterator[Metric]:
            for family in self._families:
                yield self._family(family)
            for each in self._distributions:
                buckets = [(_bound(bound), count) for bound, count in each.histogram.buckets()]
                made = HistogramMetricFamily(PREFIX + each.name, each.help, labels=["model_name"])
                made.add_metric([self._model_name], buckets, each.histogram.sum)
                yield made

        def _family(self, family: Family) -> Metric:
            kinds: dict[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
            names = list(family.values[0][0]) if family.values else []
            made: Metric = kinds[family.kind](
                PREFIX + family.name, family.help, labels=["model_name", *names]
            )
            for labels, value in family.values:
                made.add_metric([self._model_name, *labels.values()], value)  # type: ignore[attr-defined]
            return made


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))
