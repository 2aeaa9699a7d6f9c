"""Dumps of an engine that runs a few prompts."""

import random
from pathlib import Path
from typing import Any

from tiny_engine import run_all

from headrace.engine.engine import Engine
from headrace.observers.dump_diff import DumpDiff, diff_dumps
from headrace.observers.dump_files import DumpedStep, open_dump
from headrace.request.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
EVERYTHING = ("k", "v", "logits", "stream")


def prompts(lengths: tuple[int, ...] = (20, 9, 33)) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def dump(
    engine: Engine, folder: Path, wanted: list[list[int]] | None = None, **options: Any
) -> list[DumpedStep]:
    engine.dumper.start(str(folder), **options)
    run_all(engine, wanted or prompts(), [GREEDY] * len(wanted or prompts()))
    engine.settle()
    files = engine.dumper.stop()
    steps = open_dump(folder)
    assert [step.path for step in steps] == files
    return steps


def compare(a: Path, b: Path) -> DumpDiff:
    return diff_dumps(open_dump(a), open_dump(b))
