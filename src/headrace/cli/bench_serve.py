"""`headrace bench serve`: the way from its flags to what is printed."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base import env
from headrace.base.errors import ConfigError, UnsupportedError
from headrace.cli.bench_serve_flags import VOCAB_SIZE

if TYPE_CHECKING:
    from headrace.bench.serve.client import Target
    from headrace.bench.serve.measure import Plan
    from headrace.bench.serve.run import Pace, Run
    from headrace.bench.serve.summary import Summary
    from headrace.bench.serve.work import ServeLoad

FAILED, INTERRUPTED = 1, 130
INSTALL = "pip install 'headrace[bench]'"


def run(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 when a request failed; 130 after ctrl-c, when what was measured is printed."""
    try:
        from headrace.bench.serve.client import run_async
        from headrace.bench.serve.measure import measure
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headrace"):
            raise
        raise UnsupportedError(
            f"headrace bench serve needs the package {error.name}", remedy=f"Run {INSTALL}"
        ) from error
    if arguments.plot:
        from headrace.bench.plot import check_matplotlib

        check_matplotlib()
    _check_output(arguments)
    from random import SystemRandom

    seed = SystemRandom().getrandbits(32) if arguments.load_seed is None else arguments.load_seed
    report = _Report(arguments)

    async def main() -> None:
        plan = await _plan(arguments, seed)
        report.begin(plan)
        await measure(plan, on_run=report.add, show_progress=sys.stderr.isatty())

    run_async(main)
    return report.end()


async def _plan(arguments: argparse.Namespace, seed: int) -> "Plan":
    """Look at the server where the command line leaves things to it."""
    from headrace.bench.serve.client import Target
    from headrace.bench.serve.measure import Plan
    from headrace.bench.serve.run import Pace

    base_url = arguments.base_url.rstrip("/").removesuffix("/v1")
    if "://" not in base_url:
        base_url = f"http://{base_url}"
    api_key = arguments.api_key or env.api_key()
    target = Target(
        base_url=base_url,
        endpoint=arguments.endpoint,
        model=await _model(arguments, base_url, api_key),
        api_key=api_key,
        ignore_eos=arguments.ignore_eos,
        temperature=arguments.temperature,
        extra_body=arguments.extra_body,
        timeout=arguments.timeout,
    )
    paces = [
        Pace(request_rate=rate, max_concurrency=most, seed=seed)
        for rate in arguments.request_rate
        for most in arguments.max_concurrency
    ]
    return Plan(
        target=target,
        load=await _load(arguments, target, seed),
        paces=paces,
        warm_up=arguments.warm_up,
        flush_cache=arguments.flush_cache,
    )


async def _model(arguments: argparse.Namespace, base_url: str, api_key: str) -> str:
    from headrace.bench.serve.client import listed_models

    if arguments.model and not arguments.wait:
        return str(arguments.model)
    listed = await listed_models(base_url, api_key, arguments.wait)
    if not (arguments.model or listed):
        raise ConfigError(
            f"{base_url} lists no model", remedy="Name it with --model, and check --base-url"
        )
    return str(arguments.model or listed[0])


async def _load(arguments: argparse.Namespace, target: "Target", seed: int) -> "ServeLoad":
    from headrace.bench.serve.client import ask_json
    from headrace.bench.serve.work import Lengths, RandomLoad, read_load

    if arguments.prompt_file:
        return read_load(
            Path(arguments.prompt_file),
            output_len=arguments.output_len[1],
            most=arguments.num_prompts,
        )
    form = arguments.prompts or ("ids" if arguments.endpoint == "completions" else "text")
    vocab_size = arguments.vocab_size
    if form == "ids" and vocab_size is None:
        info = await ask_json(target.base_url, "/model_info", target.api_key)
        told = info.get("vocab_size") if isinstance(info, dict) else None
        vocab_size = told if isinstance(told, int) else None
    return RandomLoad(
        num_prompts=arguments.num_prompts or 100,
        input_len=Lengths(*arguments.input_len),
        output_len=Lengths(*arguments.output_len),
        shared_prefix_len=arguments.shared_prefix_len,
        prefix_groups=arguments.prefix_groups,
        form=form,
        vocab_size=vocab_size or VOCAB_SIZE,
        seed=seed,
    )


class _Report:
    """Prints each run, and keeps them for the picture."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._runs: list[tuple[Run, Summary]] = []
        self._setting: dict[str, Any] = {}
        self._title = ""

    def begin(self, plan: "Plan") -> None:
        target = plan.target
        self._title = f"{target.model} at {target.base_url}, {target.endpoint}: {plan.load}"
        self._setting = {
            "kind": "serve",
            "base_url": target.base_url,
            "endpoint": target.endpoint,
            "model": target.model,
            "load": str(plan.load),
            "temperature": target.temperature,
            "ignore_eos": target.ignore_eos,
            "extra_body": dict(target.extra_body),
            "warm_up": plan.warm_up,
        }
        print(self._title, file=sys.stderr)

    def add(self, pace: "Pace", run: "Run") -> None:
        from headrace.bench.serve.measure import details
        from headrace.bench.serve.summary import Summary

        arguments = self._arguments
        summary = Summary.of(run, arguments.goodput)
        self._runs.append((run, summary))
        asked = asdict(pace)
        if math.isinf(pace.request_rate):
            asked["request_rate"] = "inf"  # JSON has no infinity
        entry = self._setting | asked | summary.as_dict()
        if arguments.output_details:
            entry |= details(run)
        line = json.dumps(entry)
        if arguments.json:
            print(line, flush=True)
        if arguments.output_file:
            with Path(arguments.output_file).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        table = f"{pace}\n{summary.table()}"
        print(table, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    def end(self) -> int:
        if self._arguments.plot:
            from headrace.bench.serve.picture import draw

            draw(self._runs, self._title, Path(self._arguments.plot))
        if any(run.was_interrupted for run, _ in self._runs):
            return INTERRUPTED
        return FAILED if any(summary.failed for _, summary in self._runs) else 0


def _check_output(arguments: argparse.Namespace) -> None:
    """A wrong path shows before the work."""
    for file in filter(None, (arguments.output_file, arguments.plot)):
        if not Path(file).parent.is_dir():
            raise ConfigError(f"{file} cannot be written", why="there is no such folder")
    if not arguments.output_file:
        return
    try:
        with Path(arguments.output_file).open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"{arguments.output_file} cannot be written", why=str(error)) from None
