"""From the command line to a model that is ready, its first line printed."""

import argparse
import sys
from typing import TYPE_CHECKING

from headrace.base.errors import RequestError
from headrace.cli.engine_flags import engine_config, engine_options
from headrace.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from headrace.llm import LLM


def start(arguments: argparse.Namespace, *, chats: bool = False) -> "LLM":
    """Load the model that was asked for and say on stderr what it runs on.

    Args:
        chats: it must have a chat template.

    Raises:
        HeadraceError: an option is out of range, or the model cannot be served.
    """
    config = engine_config(arguments)  # out-of-range values show before torch is imported
    if chats:
        check_chats(config)
    from headrace.llm import LLM
    from headrace.runner.report import summary

    llm = LLM(config.model, show_progress=sys.stderr.isatty(), **engine_options(config))
    print(f"{config.model} on {summary(llm.explain())}", file=sys.stderr, flush=True)
    return llm


def check_chats(config: EngineConfig) -> None:
    """Raises `RequestError` for a model without chat template, before its weights are read."""
    from headrace.checkpoint import open_tokenizer

    source = open_tokenizer(config)
    if source is None or not source.chat_template:
        raise RequestError(
            f"{config.model} has no chat template",
            why="it was not trained to answer",
            remedy=f"Use headrace generate {config.model} -p TEXT, without --chat",
        )
