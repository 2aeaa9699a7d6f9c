"""Every metric in one place: name, kind, help, and where its figures come from.

Names are vLLM's where it has one, else SGLang's, else our own; docs/observability.md is the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.engine.client import EngineClient
from headrace.request.messages import Load
from headrace.serving.observability.engine_figures import EngineFigures
from headrace.serving.observability.histogram import Histogram
from headrace.serving.observability.history import History
from headrace.serving.observability.measures import Measures
from headrace.version import __version__

PREFIX = "headrace:"
MOST_REASONS = 64
"""Label sets of `forward_total`; what comes after goes together under `OTHERS`."""
OTHERS = "other reasons"
_LONGEST_REASON = 400
_LATELY = 10  # samples, of a second each

Kind = Literal["gauge", "counter"]
Labels = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Values of one name. `name` is without the prefix, and a counter's without its `_total`."""

    name: str
    kind: Kind
    help: str
    values: tuple[tuple[Labels, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One histogram."""

    name: str
    help: str
    histogram: Histogram


def distributions(measures: Measures) -> tuple[Distribution, ...]:
    """What requests went through."""

    def one(name: str, told: str, histogram: Histogram) -> Distribution:
        return Distribution(name=name, help=told, histogram=histogram)

    return (
        one(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token, as the HTTP server hands it on.",
            measures.first_token,
        ),
        one(
            "inter_token_latency_seconds",
            "From one token of a choice to the next; tokens that come together share their time.",
            measures.between_tokens,
        ),
        one(
            "e2e_request_latency_seconds",
            "From arrival to end of requests that got a whole answer.",
            measures.whole,
        ),
        one(
            "request_queue_time_seconds",
            "From the engine's queue to the first step, of a request's first sequence.",
            measures.queue,
        ),
        one(
            "request_prompt_tokens",
            "Prompt tokens of requests that got a whole answer.",
            measures.prompt_tokens,
        ),
        one(
            "request_generation_tokens",
            "Output tokens of requests that got a whole answer, all choices together.",
            measures.output_tokens,
        ),
    )


def server_families(
    state: str, engine: EngineClient | None, measures: Measures, history: History
) -> Iterator[Family]:
    """What is known without the engine."""
    is_up = float(state == "ready")
    yield _one("up", "gauge", "1 while requests are taken.", is_up)
    restarts = engine.restarts if engine is not None else 0
    yield _one("engine_restarts", "counter", "Times the engine was started again.", restarts)
    yield Family(
        name="request_success",
        kind="counter",
        help="Choices that ended, by how they ended.",
        values=tuple(({"finished_reason": each}, n) for each, n in measures.endings.items()),
    )
    lately = list(history.samples)[-_LATELY:]
    output = sum(sample.output_rate for sample in lately) / max(len(lately), 1)
    prompt = sum(sample.prompt_rate for sample in lately) / max(len(lately), 1)
    told = f"tokens per second over the last {_LATELY} s."
    yield _one("gen_throughput", "gauge", f"Output {told}", output)
    yield _one("prompt_throughput", "gauge", f"Prompt {told}", prompt)


def load_families(load: Load, page_size: int) -> Iterator[Family]:
    """What the engine says with every turn; of a dead one zeros."""
    held = load.pages_total - load.pages_free - load.pages_evictable
    hit_rate = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
    gauges: tuple[tuple[str, str, float], ...] = (
        ("num_requests_running", "Sequences that run.", load.running),
        ("num_requests_waiting", "Sequences that wait for a row or pages.", load.waiting),
        (
            "kv_cache_usage_perc",
            "Share of the KV pool that running sequences hold, 0 to 1.",
            load.kv_usage,
        ),
        ("kv_used_tokens", "Places of the KV pool that they hold.", held * page_size),
        (
            "kv_evictable_tokens",
            "Places that only the prefix cache holds.",
            load.pages_evictable * page_size,
        ),
        ("kv_available_tokens", "Places that nobody holds.", load.pages_free * page_size),
        ("max_total_num_tokens", "Places of the KV pool.", load.pages_total * page_size),
        ("cache_hit_rate", "Share of all prompt tokens that the prefix cache held.", hit_rate),
    )
    for name, told, value in gauges:
        yield _one(name, "gauge", told, value)
    counters: tuple[tuple[str, str, float], ...] = (
        (
            "prompt_tokens",
            "Prompt tokens of sequences when they first ran, cached ones included.",
            load.prompt_tokens,
        ),
        ("generation_tokens", "Output tokens.", load.output_tokens),
        ("prefix_cache_queries", "Tokens looked up in the prefix cache.", load.prompt_tokens),
        ("prefix_cache_hits", "Tokens found in the prefix cache.", load.cached_tokens),
        ("num_preemptions", "Sequences that gave up their memory for others.", load.retractions),
        (
            "kv_canary_violations",
            "Slots and tokens that the KV canary found wrong; 0 without one.",
            load.kv_canary_violations,
        ),
    )
    for name, told, value in counters:
        yield _one(name, "counter", told, value)


def engine_families(engine: EngineClient, figures: EngineFigures) -> Iterator[Family]:
    """What the engine tells when asked; as it was at the latest reply."""
    info = engine.info
    labels = {
        "version": __version__,
        "device": info.device,
        "dtype": info.dtype,
        "architecture": info.architecture,
    }
    yield Family(
        name="engine_info", kind="gauge", help="What the engine is.", values=((labels, 1.0),)
    )
    yield _one(
        "startup_time_seconds", "gauge", "From the start of its process.", info.start_seconds
    )
    if figures.age is None:
        return
    yield _one(
        "engine_figures_age_seconds",
        "gauge",
        "Time since the engine told the figures by path: it answers between two steps.",
        figures.age,
    )
    stats = figures.stats
    yield Family(
        name="forward",
        kind="counter",
        help="Forwards by the path they took and why no better one was taken.",
        values=tuple(_by_path(stats["paths"])),
    )
    yield Family(
        name="forward_seconds",
        kind="counter",
        help="Wall time by path, from launch (or the results before it, if later) to results.",
        values=tuple(({"path": path}, value) for path, value in stats["path_seconds"].items()),
    )
    yield _one(
        "computed_prompt_tokens",
        "counter",
        "Known tokens that forwards ran over: neither cached nor just sampled.",
        stats.get("prompt_tokens", 0),
    )
    yield _one("failed_steps", "counter", "Steps that raised.", stats.get("failed_steps", 0))


def _by_path(entries: list[dict[str, object]]) -> Iterator[tuple[Labels, float]]:
    """The engine counts in the order in which reasons first came, so the first ones stay."""
    counts: dict[tuple[str, str], float] = {}
    for entry in entries:
        path, refused = str(entry["path"]), str(entry["refused"])[:_LONGEST_REASON]
        if (path, refused) not in counts and len(counts) >= MOST_REASONS:
            refused = OTHERS
        counts[path, refused] = counts.get((path, refused), 0) + float(str(entry["steps"]))
    for (path, refused), steps in counts.items():
        yield {"path": path, "refused": refused}, steps


def _one(name: str, kind: Kind, told: str, value: float) -> Family:
    return Family(name=name, kind=kind, help=told, values=(({}, float(value)),))
