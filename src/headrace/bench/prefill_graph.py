"""`python -m headrace.bench.prefill_graph MODEL`: what a replayed prefill saves.

Milliseconds from one prompt to its first token, eagerly, with breakable and with piecewise graphs,
in one engine on the same weights. The ways take turns, so that a slow moment of the machine falls
on all. Graphs are captured, and pieces compiled, before anything is timed.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from headrace.base.errors import ConfigError, HeadraceError
from headrace.bench.contestants import Headrace
from headrace.bench.load import Load
from headrace.bench.setting import Setting, use_threads
from headrace.bench.shapes import shape_path
from headrace.config.plan import OFF
from headrace.execution.path import ForwardPath
from headrace.llm import LLM
from headrace.runner.choices.prefill_graph import BREAKABLE, PIECEWISE, choose_prefill_graph

LENGTHS = (16, 64, 256, 1024)
WAYS = (OFF, BREAKABLE, PIECEWISE)
REPEATS, WARM_RUNS = 15, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Prompts of one length.

    Attributes:
        seconds: of each repeat, by way. ready: seconds of capturing and compiling, by way.
        taken: steps by path, by way: whether the graph took them.
    """

    length: int
    seconds: dict[str, list[float]]
    ready: dict[str, float]
    taken: dict[str, dict[str, int]]

    def __str__(self) -> str:
        times = "".join(f"{median(each) * 1e3:>12.2f}" for each in self.seconds.values())
        made = ", ".join(f"{way} ready in {each:.1f} s" for way, each in self.ready.items())
        missed = [
            f"{way} ran {path} {steps} times"
            for way, paths in self.taken.items()
            for path, steps in paths.items()
            if path != ("eager" if way == OFF else "prefill_graph")
        ]
        return f"{self.length:>7}{times}   {'; '.join((made, *missed))}".rstrip("; ")


def measure(
    llm: LLM, lengths: Sequence[int], ways: Sequence[str] = WAYS, repeats: int = REPEATS
) -> Iterator[FirstTokens]:
    """First tokens of prompts of each length.

    Args:
        llm: made with `prefill_graph` off, without prefix cache.

    Raises:
        UnsupportedError: a way that cannot be on this device.
    """
    tables = {way: _table(llm, way) for way in ways}
    for length in lengths:
        yield _measure_one(llm, tables, length, repeats)


def _table(llm: LLM, way: str) -> list[ForwardPath]:
    runner = llm.engine.worker.runner
    config = replace(runner.config, prefill_graph=way)
    decision = choose_prefill_graph(
        config, llm.engine.settled.hardware, llm.engine.settled.persona.traits
    )
    return runner.make_paths(replace(runner.plan, prefill_graph=decision)).table


def _measure_one(
    llm: LLM, tables: dict[str, list[ForwardPath]], length: int, repeats: int
) -> FirstTokens:
    selector, ours = llm.engine.worker.runner.selector, Headrace(llm)
    vocabulary = llm.engine.vocab_size
    load = Load(num_prompts=1, input_len=length, output_len=1)
    seconds: dict[str, list[float]] = {way: [] for way in tables}
    ready: dict[str, float] = {}
    taken: dict[str, dict[str, int]] = {way: {} for way in tables}
    before = selector.paths
    try:
        for repeat in range(-WARM_RUNS, repeats):
            for way, table in tables.items():
                prompts = load.prompts(repeat + WARM_RUNS, vocabulary)
                selector.paths = tuple(table)
                selector.counts.clear()
                start = time.perf_counter()
                ours.run(prompts, 1)
                took = time.perf_counter() - start
                if repeat == -WARM_RUNS:
                    ready[way] = took
                if repeat >= 0:
                    seconds[way].append(took)
                    for (path, _), steps in selector.counts.items():
                        taken[way][path] = taken[way].get(path, 0) + steps
    finally:
        selector.paths = before
    return FirstTokens(length=length, seconds=seconds, ready=ready, taken=taken)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.prefill_graph")
    parser.add_argument("model", help="path, short name, hub id or shape")
    parser.add_argument("--lengths", type=_numbers, default=LENGTHS, help="tokens of the prompts")
    parser.add_argument("--ways", default=",".join(WAYS), help="of off, breakable, piecewise")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--dtype", default="auto")
    asked = parser.parse_args(arguments)
    folder = shape_path(asked.model)
    try:
        ways = asked.ways.split(",")
        if unknown := set(ways) - set(WAYS):
            raise ConfigError(f"Unknown ways: {', '.join(unknown)}")
        with LLM(
            folder or asked.model,
            dtype=asked.dtype,
            decode_graph="off",
            prefill_graph=OFF,
            enable_prefix_cache=False,
            load_format="auto" if folder is None else "dummy",
            max_model_len=max(asked.lengths) + 16,
            max_total_tokens=4 * (max(asked.lengths) + 16),
        ) as llm:
            print(Setting.of(llm, threads=use_threads(None), repeats=asked.repeats))
            heads = "".join(f"{way:>12}" for way in ways)
            print(f"{'tokens':>7}{heads}   (ms)", flush=True)
            for found in measure(llm, asked.lengths, ways, asked.repeats):
                print(found, flush=True)
    except HeadraceError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
