"""Random workloads, and random ways to run them: what a request must not notice.

A workload is some requests with the turns at which they arrive; a setting is an engine's options.
Everything is drawn from a seed, so that a failure can be had again.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.config.engine_config import EngineConfig
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams
from headrace.testing.combinations import CACHES

LONGEST_PROMPT, MOST_TOKENS = 110, 14
LONG_PROMPT = 300  # of some: enough tokens for a step in parts, whose layers wait for others
MAX_MODEL_LEN = 320
ROWS = 8
GRAPHS = (("auto", "auto"), ("auto", "off"), ("off", "auto"), ("off", "off"))  # decode, prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `arrival`: turns of the loop before it comes."""

    prompt: list[int]
    want: SamplingParams | PoolingParams
    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that share an engine for a while.

    Attributes:
        warmers: prompts that run first, so that the cache holds beginnings of others.
        salt: of the prefix cache; workloads with the same one share it.
    """

    asks: list[Ask]
    warmers: list[list[int]]
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an engine runs: `options` are fields of `EngineConfig`."""

    options: dict[str, Any]
    cache: str
    retract_every: int
    workloads: list[Workload] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in self.options.items()]
        return ", ".join([*parts, f"cache {self.cache}", f"retract_every {self.retract_every}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What workloads are drawn for.

    Attributes:
        has_graphs: the device captures graphs, so that they are varied too.
        has_tokenizer: words can be forbidden, and forms of the answer asked for.
    """

    vocab_size: int
    has_graphs: bool
    has_tokenizer: bool


def draw_settings(
    asked: EngineConfig, subject: Subject, *, workloads: int, each: int, seed: int
) -> Iterator[Setting]:
    """Engines with `each` workloads, until there are `workloads` of them."""
    draw = random.Random(seed)
    done = 0
    while done < workloads:
        count = min(each, workloads - done)
        yield _setting(draw, asked, subject, done // each, count)
        done += count


def _setting(
    draw: random.Random, asked: EngineConfig, subject: Subject, number: int, count: int
) -> Setting:
    cache = draw.choice(CACHES) if asked.enable_prefix_cache else "off"
    page = asked.page_size or draw.choice((1, 4, 16, 64))
    tight = MAX_MODEL_LEN * draw.choice((1, 2, ROWS))  # two pages at least for every row
    split = asked.split_prefill_layers or draw.choice((None, None, 1))
    chunk = draw.choice((3, 16, 29, 64, 512)) if split is None else 512
    options: dict[str, Any] = {
        "page_size": page,
        "chunked_prefill_size": asked.chunked_prefill_size or chunk,
        "enable_prefix_cache": cache != "off",
        "enable_overlap": draw.random() < 0.5
        if asked.enable_overlap is None
        else asked.enable_overlap,
        "max_running_requests": draw.choice((2, 5, ROWS)),
        "split_prefill_layers": split,
        "max_total_tokens": max(tight, 2 * page * ROWS),
    }
    if subject.has_graphs:  # in turn, so that few engines meet them all
        decode, prefill = GRAPHS[number % len(GRAPHS)]
        rows = options["max_running_requests"]
        sizes = tuple(size for size in (1, 2, 4, ROWS) if size < rows)
        options["decode_graph"] = (*sizes, rows) if decode == "auto" else decode
        options["prefill_graph"] = prefill
    return Setting(
        options=options,
        cache=cache,
        retract_every=draw.choice((0, 0, 2, 5)),
        workloads=[_workload(draw, subject, cache, salt=draw.choice("ab")) for _ in range(count)],
    )


def _workload(draw: random.Random, subject: Subject, cache: str, *, salt: str) -> Workload:
    vocab_size = subject.vocab_size
    shared = _ids(draw, vocab_size, draw.randrange(8, 80))
    asks = []
    arrival = 0
    for _ in range(draw.randrange(3, 9)):
        length = min(LONGEST_PROMPT, int(draw.expovariate(1 / 30)) + 1)
        prompt = _ids(draw, vocab_size, length)
        if draw.random() < 0.4:
            prompt = (shared + prompt)[:LONGEST_PROMPT]
        elif draw.random() < 0.15:
            prompt = _ids(draw, vocab_size, LONG_PROMPT)
        asks.append(Ask(prompt=prompt, want=_want(draw, subject), arrival=arrival))
        arrival += draw.choice((0, 0, 0, 1, 3, 10))
    shares = {"warm": 0.5, "hit": 1.0}
    kept = [ask.prompt[: int(len(ask.prompt) * shares[cache])] for ask in asks if cache in shares]
    return Workload(asks=asks, warmers=[prompt for prompt in kept if prompt], salt=salt)


def _ids(draw: random.Random, vocab_size: int, count: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(count)]


def _want(draw: random.Random, subject: Subject) -> SamplingParams | PoolingParams:
    if draw.random() < 0.15:
        return PoolingParams(pooling=draw.choice(("mean", "last")), normalize=draw.random() < 0.5)
    many, vocab_size = draw.randrange(1, MOST_TOKENS), subject.vocab_size
    options: dict[str, Any] = {
        "max_tokens": many,
        "ignore_eos": True,
        "logprobs": draw.choice((0, 1, 4, 9)),
        "prompt_logprobs": draw.choice((None, None, None, 0, 3)),
        "n": draw.choice((1, 1, 1, 2)),
        "seed": draw.randrange(1 << 40),
        "temperature": draw.choice((0.0, 0.0, 0.3, 0.9, 1.5)),
        "return_hidden_states": draw.choice(("none", "none", "none", "last", "all")),
    }
    if draw.random() < 0.3:
        options |= {"stop_token_ids": _ids(draw, vocab_size, 20), "min_tokens": min(2, many)}
    if draw.random() < 0.3:
        options["logprobs_mode"] = "processed"
    if draw.random() < 0.3:
        options["logprob_token_ids"] = _ids(draw, vocab_size, 3)
    if subject.has_tokenizer and draw.random() < 0.25:  # they make a step leave its kernels
        options["bad_words"] = ["a", "be", "\n"]
    return SamplingParams(**options, **_changes(draw, vocab_size))


def _changes(draw: random.Random, vocab_size: int) -> dict[str, Any]:
    """Filters, penalties and bias, each alone or together with others."""
    options: dict[str, Any] = {}
    for name, values in (
        ("top_p", (0.5, 0.9)),
        ("top_k", (2, 40)),
        ("min_p", (0.02, 0.2)),
        ("presence_penalty", (0.5, -0.5)),
        ("frequency_penalty", (0.3, 1.0)),
        ("repetition_penalty", (1.2, 0.8)),
    ):
        if draw.random() < 0.25:
            options[name] = draw.choice(values)
    if draw.random() < 0.2:
        options["logit_bias"] = dict.fromkeys(_ids(draw, vocab_size, 3), 4.0)
    if draw.random() < 0.15:
        options["allowed_token_ids"] = _ids(draw, vocab_size, vocab_size // 4)
    return options
