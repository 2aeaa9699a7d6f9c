"""`headrace explain MODEL`: the plan, without loading weights."""

import argparse
import json
from dataclasses import asdict

from headrace.base.layout import output_width
from headrace.cli.engine_flags import engine_config
from headrace.config.hardware import assumed_hardware
from headrace.version import __version__


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    assumed = None if arguments.assume_gpu is None else assumed_hardware(arguments.assume_gpu)
    # imports torch, so only after the arguments were checked
    from headrace.engine.explanation import explanation_of
    from headrace.runner.assembly import settle
    from headrace.runner.report import as_dict, render

    explanation = explanation_of(settle(config, assumed, weights=False))
    if arguments.json:
        print(json.dumps({"asked": asdict(config), **as_dict(explanation)}, indent=2))
        return 0
    print(f"{config.model}, headrace {__version__}\n")
    print(render(explanation, width=output_width()))
    return 0
