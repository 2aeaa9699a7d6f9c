"""From the command line to a model that is ready, its first line printed."""

import argparse
import sys
from typing import TYPE_CHECKING

from headrace.cli.engine_flags import engine_config, engine_options

if TYPE_CHECKING:
    from headrace.llm import LLM


def start(arguments: argparse.Namespace) -> "LLM":
    """Load the model that was asked for and say on stderr what it runs on.

    Raises:
        HeadraceError: an option is out of range, or the model cannot be served.
    """
    config = engine_config(arguments)  # out-of-range values show before torch is imported
    from headrace.llm import LLM
    from headrace.runner.report import summary

    llm = LLM(config.model, show_progress=sys.stderr.isatty(), **engine_options(config))
    print(f"{config.model} on {summary(llm.explain())}", file=sys.stderr, flush=True)
    return llm
