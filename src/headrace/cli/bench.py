"""`headrace bench offline | step | startup | ceilings | plot`."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.layout import output_width, tell
from headrace.cli.engine_flags import engine_config, engine_options
from headrace.cli.flags import destination
from headrace.cli.start import start
from headrace.config.engine_config import EngineConfig

LOAD_FORMAT = destination(EngineConfig, "load_format")
PREFILLS = (1, 32)  # prompts read at once, as far as a batch has as many
PREFIX_CACHE = destination(EngineConfig, "enable_prefix_cache")


def offline(arguments: argparse.Namespace) -> int:
    from headrace.bench.load import Load

    loads = [
        Load(
            num_prompts=count,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            shared_prefix_len=arguments.shared_prefix_len,
            batch=arguments.batch,
            seed=arguments.load_seed,
        )
        for count in arguments.num_prompts
    ]
    from headrace.bench.contestants import require_transformers
    from headrace.bench.offline import measure, table
    from headrace.bench.setting import Setting, engines_of, use_threads

    if arguments.against is not None:
        require_transformers()
    _take_shape(arguments)
    threads = use_threads(arguments.threads)
    with start(arguments) as llm:
        for load in loads:
            load.check_fits(llm.explain().plan.max_model_len.value)
        setting = Setting.of(llm, threads=threads, repeats=arguments.repeats)
        engines = engines_of(llm, arguments.against)
        found = []
        for measurement in measure(
            engines,
            loads,
            vocab_size=setting.vocab_size,
            repeats=arguments.repeats,
            first_token_len=arguments.first_token_len,
        ):
            found.append(measurement)
            _line(arguments, setting.as_dict() | measurement.as_dict())
    _show(arguments, f"{setting}\n{table(found)}")
    return 0


def step(arguments: argparse.Namespace) -> int:
    """Ceilings first, while the memory is free; then the model."""
    _take_shape(arguments)
    if getattr(arguments, PREFIX_CACHE, False):
        raise ConfigError(
            "bench step measures without the prefix cache",
            why="it sends the same prompts twice",
            remedy="Leave --enable-prefix-cache out",
        )
    setattr(arguments, PREFIX_CACHE, False)
    from headrace.bench.setting import Setting, ceilings_of, use_threads
    from headrace.bench.step import StepBench, StepWork
    from headrace.bench.step_table import table

    threads = use_threads(arguments.threads)
    ceilings = ceilings_of(engine_config(arguments))
    work = StepWork(
        batches=arguments.batch,
        prefills=arguments.prefill or tuple(n for n in PREFILLS if n <= max(arguments.batch)),
        context=arguments.context,
        output_len=arguments.output_len,
        repeats=arguments.repeats,
        trace_turns=arguments.trace_turns,
        mixed=arguments.mixed,
        hidden_states=arguments.hidden_states,
    )
    with start(arguments) as llm:
        setting = Setting.of(llm, threads=threads, repeats=arguments.repeats)
        circumstances = setting.as_dict() | {"ceilings": ceilings.as_dict()}
        found = []
        for entry in StepBench(llm, work, ceilings, tell=tell).measure():
            found.append(entry)
            _line(arguments, circumstances | entry.as_dict())
    _show(arguments, f"{setting}\n{ceilings}\n{table(found, output_width())}")
    return 0


def startup(arguments: argparse.Namespace) -> int:
    from headrace.bench.startup import measure_starts, table

    _take_shape(arguments)
    config = engine_config(arguments)
    found = []
    for entry in measure_starts(
        {"model": config.model, **engine_options(config)},
        input_len=arguments.input_len,
        repeats=arguments.repeats,
        graphs=arguments.graphs,
    ):
        found.append(entry)
        _line(arguments, entry.as_dict())
    last = found[-1]
    setting = f"{last.model}, {last.dtype}, {last.hardware}, fresh processes"
    _show(arguments, f"{setting}\n{table(found)}")
    return 0


def ceilings(arguments: argparse.Namespace) -> int:
    from headrace.bench.setting import device_ceilings, use_threads

    use_threads(arguments.threads)
    found = device_ceilings(arguments.device, arguments.dtype)
    _line(arguments, {"kind": "ceilings", **found.as_dict()})
    _show(arguments, str(found))
    return 0


def plot(arguments: argparse.Namespace) -> int:
    from headrace.bench.plot import draw, read_decodes

    draw(read_decodes(map(Path, arguments.files)), Path(arguments.output))
    print(arguments.output)
    return 0


def _take_shape(arguments: argparse.Namespace) -> None:
    """Let MODEL be the name of a shape that comes with the benchmarks; its weights are dummies."""
    from headrace.bench.shapes import shape_path

    folder = shape_path(arguments.model)
    if folder is not None:
        arguments.model = str(folder)
        if not hasattr(arguments, LOAD_FORMAT):
            setattr(arguments, LOAD_FORMAT, "dummy")


def _line(arguments: argparse.Namespace, entry: Mapping[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(entry), flush=True)


def _show(arguments: argparse.Namespace, text: str) -> None:
    """The table, for people; beside JSON lines it goes where it does not mix with them."""
    print(text, file=sys.stderr if arguments.json else sys.stdout)
