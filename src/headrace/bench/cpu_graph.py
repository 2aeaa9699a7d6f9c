"""`python -m headrace.bench.cpu_graph MODEL`: does compiling decode steps pay on this CPU?

Turns of one batch alternate between the CPU graph and eager, so that a slow moment of the machine
falls on both. What is found is kept for this CPU, torch, number of threads, model shape and dtype,
and `cpu_graph="auto"` follows it from then on.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from headrace.base.errors import HeadraceError
from headrace.bench.decoding import Decoding
from headrace.bench.load import Load
from headrace.llm import LLM
from headrace.runner.cpu_graph_gains import CpuGraphGain, shape_of, write_gain

ROWS = (1, 8)
CONTEXT = 128
TURNS = 60  # of each of the two


def measure(llm: LLM, rows: Sequence[int] = ROWS, turns: int = TURNS) -> CpuGraphGain:
    """Median milliseconds of a turn, eager and compiled.

    Args:
        llm: made with `cpu_graph="on"`.

    Raises:
        ConfigError, CapacityError: the batches do not fit.
    """
    explanation = llm.explain()
    traits = explanation.persona.traits
    return CpuGraphGain(
        cpu=explanation.hardware.name,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        shape=shape_of(traits),
        dtype=explanation.plan.dtype.value,
        rows={str(count): _times(llm, count, traits.vocab_size, turns) for count in rows},
        day=time.strftime("%Y-%m-%d"),
    )


def _times(llm: LLM, rows: int, vocab_size: int, turns: int) -> list[float]:
    selector = llm.engine.worker.runner.selector
    both = selector.paths
    eager = both[1:]
    assert both[0].name == "cpu_graph", "asked to be on"
    prompts = Load(num_prompts=rows, input_len=CONTEXT, output_len=1).prompts(0, vocab_size)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    try:
        with Decoding(llm, prompts, [{}] * rows, 2 * turns) as batch:
            for turn in range(2 * turns):
                compiled = turn % 2 == 1
                selector.paths = both if compiled else eager
                seconds[compiled].append(batch.turn())
    finally:
        selector.paths = both
    return [round(median(seconds[compiled]) * 1e3, 3) for compiled in (False, True)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.cpu_graph", description=__doc__)
    parser.add_argument("model", help="path, short name or hub id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each of the two")
    asked = parser.parse_args(arguments)
    try:
        with LLM(asked.model, device="cpu", dtype=asked.dtype, cpu_graph="on") as llm:
            gain = measure(llm, turns=asked.turns)
            path = llm.engine.worker.runner.paths.cpu_graph
            assert path is not None, "asked to be on"
            for bucket, seconds in path.prepare().seconds.items():
                print(f"compiled {bucket.sequences} rows in {seconds:.1f} s")
        print(f"{gain.shape}, {gain.dtype}, {gain.cpu}, {gain.threads} threads, torch {gain.torch}")
        print(f"{gain}\nit {'pays' if gain.pays else 'does not pay'}; kept in {write_gain(gain)}")
    except HeadraceError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
