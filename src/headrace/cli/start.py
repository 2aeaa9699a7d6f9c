"""From the command line to a model that is ready, its first line printed."""

import argparse
import sys
from dataclasses import replace
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
    model = chat_model(config) if chats else config.model
    from headrace.llm import LLM
    from headrace.runner.report import summary

    llm = LLM(model, show_progress=sys.stderr.isatty(), **engine_options(config))
    print(f"{config.model} on {summary(llm.explain())}", file=sys.stderr, flush=True)
    return llm


def chat_model(config: EngineConfig) -> str:
    """The path of a model that has a chat template, so that a hub is asked for it once.

    Raises:
        RequestError: it has none; its weights are not read.
    """
    from headrace.checkpoint import open_tokenizer, resolve_model

    path = str(resolve_model(config.model, config.revision))
    source = open_tokenizer(replace(config, model=path))
    if source is None or not source.chat_template:
        raise RequestError(
            f"{config.model} has no chat template",
            why="it was not trained to answer",
            remedy=f"Use headrace generate {config.model} -p TEXT, without --chat; or give it a "
            "template with --chat-template FILE",
        )
    return path
