"""Figures of an engine: how busy it is, and what it has done since its start."""

from typing import Any

from headrace.request.messages import Load
from headrace.sampling.grammar.compiler import GrammarCompiler
from headrace.scheduler.scheduler import Scheduler


def load_of(scheduler: Scheduler) -> Load:
    """How busy it is; cheap enough for every turn."""
    keeper, chooser = scheduler.keeper, scheduler.chooser
    return Load(
        running=len(chooser.running),
        waiting=len(chooser.waiting),
        pages_total=keeper.allocator.total,
        pages_free=keeper.allocator.available,
        pages_cached=keeper.cache.held_pages,
        pages_evictable=keeper.cache.evictable_pages,
        prompt_tokens=keeper.queried_tokens,
        cached_tokens=keeper.hit_tokens,
        output_tokens=scheduler.counts["output_tokens"],
        retractions=chooser.retractions,
        kv_canary_violations=scheduler.counts["kv_canary_violations"],
    )


def stats_of(scheduler: Scheduler, grammars: GrammarCompiler) -> dict[str, Any]:
    """Counters since the start and the state of memory now, in plain types."""
    keeper, runner = scheduler.keeper, scheduler.worker.runner
    return {
        **scheduler.counts,
        **grammars.stats(),
        "running": len(scheduler.chooser.running),
        "waiting": len(scheduler.chooser.waiting),
        "pages_total": keeper.allocator.total,
        "pages_free": keeper.allocator.available,
        "pages_cached": keeper.cache.held_pages,
        "pages_evictable": keeper.cache.evictable_pages,
        "page_size": keeper.page_size,
        "prompt_tokens_queried": keeper.queried_tokens,
        "prompt_tokens_cached": keeper.hit_tokens,
        "retractions": scheduler.chooser.retractions,
        "paths": [
            {"path": path, "refused": refused, "steps": steps}
            for (path, refused), steps in runner.selector.counts.items()
        ],
        "path_seconds": dict(scheduler.history.path_seconds),
        "observers": runner.observers.stats(),
    }
