"""`headrace explain MODEL`: the plan, without loading weights; a config.json is enough."""

import argparse
import json
from dataclasses import asdict

from headrace.base.layout import output_width
from headrace.bench.shapes import shape_path, shown_name
from headrace.cli.engine_flags import engine_config
from headrace.config.hardware import assumed_hardware
from headrace.version import __version__


def run(arguments: argparse.Namespace) -> int:
    arguments.model = str(shape_path(arguments.model) or arguments.model)
    config = engine_config(arguments)
    assumed = None if arguments.assume_gpu is None else assumed_hardware(arguments.assume_gpu)
    # imports torch, so only after the arguments were checked
    from headrace.engine.explanation import explanation_of
    from headrace.runner.assembly import settle
    from headrace.runner.report import as_dict, render

    explanation = explanation_of(settle(config, assumed, weights=False))
    if arguments.json:
        asked = asdict(config) | {"model": shown_name(config.model)}
        print(json.dumps({"asked": asked, **as_dict(explanation)}, indent=2))
        return 0
    print(f"{shown_name(config.model)}, headrace {__version__}\n")
    print(render(explanation, width=output_width()))
    return 0
