"""Configurations of an engine: the axes, what the plan admits of them, and a few that cover pairs.

A fault usually needs one or two things to come together (a page size and a path, a cache hit and a
small chunk), so a set in which every pair of values occurs finds it without running the product.
(Pairwise testing: Cohen et al., "The AETG system", 1997.)
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import Any

from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.base.decision import Refusal
from headrace.base.errors import HeadraceError
from headrace.config.engine_config import EngineConfig
from headrace.config.plan import Plan
from headrace.runner.assembly import Settled
from headrace.runner.checkpoint_facts import checkpoint_facts
from headrace.runner.resolve import resolve

ALL_OFF: Mapping[str, Any] = {
    "decode_graph": "off",
    "capture": "need",
    "prefill_graph": "off",
    "cpu_graph": "off",
}
# Each path with what asks for it; the first key is the decision that says whether it is there.
PATHS: Mapping[str, Mapping[str, Any]] = {
    "eager": {},
    "decode_graph": {"decode_graph": "auto"},
    "prefill_graph": {"prefill_graph": "breakable"},
    "prefill_graph (piecewise)": {"prefill_graph": "piecewise"},
    "cpu_graph": {"cpu_graph": "on"},
}
OF_DECODE_STEPS = ("decode_graph", "cpu_graph")
CACHES = ("off", "cold", "warm", "hit")
PAGE_SIZES = (1, 16, 64)
CHUNKS = (29, 64, 1024)
PAIRWISE_ORDERS = 8
CAPTURE_COST = 3  # of a configuration that captures or compiles, in those that do not
RETRACT_EVERY = 2  # steps


def one_by_one(asked: EngineConfig, *, longest: int, **options: Any) -> EngineConfig:
    """An engine that runs each sequence by itself: eager, in one chunk, without cache and overlap.

    Args:
        longest: tokens of the longest sequence.
    """
    return replace(
        asked,
        **ALL_OFF,
        chunked_prefill_size=longest,
        max_total_tokens=max(longest, asked.max_model_len or 0),
        max_running_requests=1,
        enable_prefix_cache=False,
        enable_overlap=False,
        **options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to run the workload.

    Attributes:
        path: key of `PATHS`.
        attention: backend of both phases, or "one+other" for one in prefill and another in decode.
        chunk: prompt tokens a step at most.
        cache: off; cold, nothing in it but what the wave itself shares; warm, half of every prompt;
            hit, all of every prompt that may come from a cache.
        retraction: a sequence loses row and pages every other step and resumes later.
    """

    path: str
    attention: str
    page_size: int
    chunk: int
    cache: str
    overlap: bool
    retraction: bool

    def __str__(self) -> str:
        extras = [name for name in ("overlap", "retraction") if getattr(self, name)]
        parts = (f"page {self.page_size}", f"chunk {self.chunk}", f"cache {self.cache}")
        return ", ".join((f"{self.path} / {self.attention}", *parts, *extras))

    def applied_to(self, asked: EngineConfig) -> EngineConfig:
        """What an engine is asked for that is to run this way."""
        options = {**ALL_OFF, **PATHS[self.path]}
        if "decode_graph" in PATHS[self.path] and isinstance(asked.decode_graph, tuple):
            options |= {"decode_graph": asked.decode_graph}
        prefill, _, decode = self.attention.partition("+")
        return replace(
            asked,
            **options,
            attention_backend=None,
            prefill_attention_backend=prefill,
            decode_attention_backend=decode or prefill,
            page_size=self.page_size,
            chunked_prefill_size=self.chunk,
            enable_prefix_cache=self.cache != "off",
            enable_overlap=self.overlap,
        )

    @property
    def path_name(self) -> str:
        """What the steps on this path are called, `eager` for the one that has no decision."""
        return next(iter(PATHS[self.path]), "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Configurations that the plan admits, and why the others are not among them."""

    configurations: list[Configuration]
    refused: list[Refusal]


def admitted(asked: EngineConfig, settled: Settled, *, outputs: int) -> Admitted:
    """Every configuration within `asked`: what was asked for by name stays, the rest varies.

    Args:
        outputs: tokens that a prompt of the workload makes, at most.
    """
    found: list[Configuration] = []
    refused: dict[Refusal, None] = {}
    retracted = outputs > RETRACT_EVERY
    if not retracted:
        refused[_too_short("retraction", RETRACT_EVERY)] = None
    for path, attention, page_size in product(
        PATHS, _attention_names(asked), _given(asked.page_size, PAGE_SIZES)
    ):
        family = [
            Configuration(
                path=path,
                attention=attention,
                page_size=page_size,
                chunk=chunk,
                cache=cache,
                overlap=overlap,
                retraction=retraction,
            )
            for chunk, cache, overlap, retraction in product(
                _given(asked.chunked_prefill_size, CHUNKS),
                CACHES if asked.enable_prefix_cache else ("off",),
                _given(asked.enable_overlap, (False, True)),
                (False, True) if retracted else (False,),
            )
        ]
        refusal = _ruled_out(asked, path, outputs) or _refusal(asked, settled, family[0])
        if refusal is None:
            found += family
        else:
            refused[refusal] = None
    return Admitted(configurations=found, refused=list(refused))


def pairwise(candidates: Sequence[Configuration], seed: int) -> list[Configuration]:
    """Few of the candidates in which every pair of values occurs that occurs in any of them.

    Taking what adds most depends on the order among equals: the cheapest of some orders, in each of
    which what need not be captured or compiled comes first.
    """
    draw = random.Random(seed)
    orders = [
        sorted(draw.sample(candidates, len(candidates)), key=_cost) for _ in range(PAIRWISE_ORDERS)
    ]
    return min(map(_greedy_pairwise, orders), key=lambda chosen: sum(map(_cost, chosen)))


def _cost(configuration: Configuration) -> int:
    return 1 if configuration.path_name == "eager" else CAPTURE_COST


def _greedy_pairwise(order: Sequence[Configuration]) -> list[Configuration]:
    pairs = {candidate: frozenset(_pairs(candidate)) for candidate in order}
    missing = set().union(*pairs.values())
    chosen: list[Configuration] = []
    while missing:
        best = max(order, key=lambda candidate: len(pairs[candidate] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def _pairs(configuration: Configuration) -> Iterator[tuple[object, ...]]:
    values = [(entry.name, getattr(configuration, entry.name)) for entry in fields(configuration)]
    return combinations(values, 2)


def _attention_names(asked: EngineConfig) -> tuple[str, ...]:
    both = asked.attention_backend
    phases = (asked.prefill_attention_backend or both, asked.decode_attention_backend or both)
    named = tuple(name for name in dict.fromkeys(phases) if name not in (None, "auto"))
    if not named:
        return tuple(ATTENTION_BACKENDS)
    return ("+".join(named),) if None not in phases else named


def _given(asked: Any, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    return otherwise if asked is None else (asked,)


def _ruled_out(asked: EngineConfig, path: str, outputs: int) -> Refusal | None:
    """A path that was asked to be off, or to be another variant, or that no step would take."""
    if path in OF_DECODE_STEPS and outputs == 1:
        return _too_short(path, 1)
    for name, value in PATHS[path].items():
        given = getattr(asked, name)
        if isinstance(given, str) and given not in ("auto", value):
            return Refusal(subject=path, reason=f"{name} {given} was asked")
    return None


def _too_short(subject: str, outputs: int) -> Refusal:
    return Refusal(
        subject=subject,
        reason=f"no prompt makes more than {outputs} {'token' if outputs == 1 else 'tokens'}",
        remedy="Raise max_tokens",
    )


def _refusal(asked: EngineConfig, settled: Settled, wanted: Configuration) -> Refusal | None:
    """Why the plan does not admit a configuration; `None` when it does."""
    subject = f"{wanted.path} / {wanted.attention}"
    try:
        config = wanted.applied_to(asked)
        facts = checkpoint_facts(settled.checkpoint)
        plan = resolve(config, settled.persona, settled.hardware, checkpoint=facts)
    except HeadraceError as error:
        return Refusal(subject=subject, reason=error.why or error.what, remedy=error.remedy)
    return _why_absent(plan, wanted, subject)


def _why_absent(plan: Plan, wanted: Configuration, subject: str) -> Refusal | None:
    if wanted.path_name == "eager":
        return None
    decision = getattr(plan, wanted.path_name)
    if decision.value != "off":
        return None
    refusal = next(iter(decision.refused), None)
    reason = decision.reason if refusal is None else refusal.reason
    return Refusal(subject=subject, reason=reason, remedy=refusal.remedy if refusal else "")
