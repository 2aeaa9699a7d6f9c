"""Many prompts at once, no server: our engine, and a peer that does the same work in the same run.

Repeats alternate between the engines, so that a slow moment of the machine falls on both.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from headrace.bench.contestants import Contestant
from headrace.bench.load import Load

WARM_UP = Load(num_prompts=2, input_len=16, output_len=4, seed=2**32 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of each repeat of one piece of work on one engine.

    `what` is "run" for the whole load, "first token" for one prompt cold, "first token, cached" for
    the same prompt once more.
    """

    engine: str
    what: str
    load: Load
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens made per second, the prefill's time included."""
        return self.load.output_tokens / self.median

    @property
    def total_tokens_per_second(self) -> float:
        """Tokens read and made per second."""
        return self.load.total_tokens / self.median

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "seconds": list(self.seconds),
            "median_seconds": self.median,
            "output_tokens_per_second": self.tokens_per_second,
            "total_tokens_per_second": self.total_tokens_per_second,
        }


def measure(
    engines: Sequence[Contestant],
    loads: Sequence[Load],
    *,
    vocab_size: int,
    repeats: int,
    first_token_len: int | None = None,
) -> Iterator[Measurement]:
    """Run every load on every engine.

    Args:
        engines: ours first; only ours is measured with a cached prompt.
        first_token_len: measure too how long one prompt of so many tokens takes to its first token.
    """
    for engine in engines:
        engine.run(WARM_UP.prompts(0, vocab_size), WARM_UP.output_len)
    for load in loads:
        yield from _alternate(engines, load, "run", repeats, vocab_size)
    if first_token_len is None:
        return
    load = Load(num_prompts=1, input_len=first_token_len, output_len=1, seed=loads[0].seed + 1)
    yield from _alternate(engines, load, "first token", repeats, vocab_size)
    # the same prompts as just now: what the engine kept of them is used
    yield from _alternate(engines[:1], load, "first token, cached", repeats, vocab_size)


def _alternate(
    engines: Sequence[Contestant],
    load: Load,
    what: str,
    repeats: int,
    vocab_size: int,
) -> Iterator[Measurement]:
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for repeat in range(repeats):
        for engine in engines:
            seconds[engine.name].append(_timed(engine, load, repeat, vocab_size))
    for name, times in seconds.items():
        yield Measurement(engine=name, what=what, load=load, seconds=tuple(times))


def _timed(engine: Contestant, load: Load, repeat: int, vocab_size: int) -> float:
    prompts = load.prompts(repeat, vocab_size)
    if load.shared_prefix_len:
        engine.warm_prefix(prompts[0][: load.shared_prefix_len])
    start = time.perf_counter()
    for batch in load.batches(prompts):
        engine.run(batch, load.output_len)
    return time.perf_counter() - start


def table(measurements: Sequence[Measurement]) -> str:
    """Rows of work, columns of engines; the ratio is the peer's time over ours."""
    names = list(dict.fromkeys(entry.engine for entry in measurements))
    rows: dict[tuple[str, str], dict[str, Measurement]] = {}
    for entry in measurements:
        rows.setdefault((entry.what, str(entry.load)), {})[entry.engine] = entry
    width = max(len(f"{what}: {load}") for what, load in rows)
    head = [f"{'work':<{width}}", f"{'unit':<12}", *(f"{name:>14}" for name in names)]
    lines = ["  ".join([*head, f"{'ratio':>6}" if len(names) > 1 else ""]).rstrip()]
    for (what, load), found in rows.items():
        label, more = f"{what}: {load}", ""
        ratio = f"{ratio_of(found, names):>6.2f}" if len(found) > 1 else ""
        for unit, shown in _UNITS[what == "run"].items():
            cells = [f"{shown(found[name]):>14}" if name in found else " " * 14 for name in names]
            lines.append(
                "  ".join([f"{more or label:<{width}}", f"{unit:<12}", *cells, ratio]).rstrip()
            )
            more = " "
    return "\n".join(lines)


def ratio_of(found: dict[str, Measurement], names: Sequence[str]) -> float:
    """How many times as fast as the peer we are: the peer's median time over ours."""
    return found[names[1]].median / found[names[0]].median


_UNITS: dict[bool, dict[str, Callable[[Measurement], str]]] = {
    True: {
        "out tokens/s": lambda entry: f"{entry.tokens_per_second:,.1f}",
        "in+out/s": lambda entry: f"{entry.total_tokens_per_second:,.1f}",
    },
    False: {"ms": lambda entry: f"{entry.median * 1e3:,.1f}"},
}
