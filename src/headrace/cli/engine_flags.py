"""Flags of `EngineConfig`."""

import argparse
from collections.abc import Mapping

from headrace.cli.flags import add_field_flags, given_fields
from headrace.cli.parser import Parser
from headrace.config.engine_config import EngineConfig

# First field -> heading in `--help`.
SECTIONS = {
    "tokenizer": "engine (model and device)",
    "max_model_len": "engine (memory and batches)",
    "attention_backend": "engine (attention and graphs)",
    "enable_return_routed_experts": "engine (experts, exactness, checks)",
}
NOTE = "What has no default, or auto, follows from model and device: see explain."


def add_model(parser: Parser, more: str = "") -> None:
    """The positional MODEL.

    Args:
        more: what it may be besides, as "; or a shape".
    """
    parser.add_argument("model", metavar="MODEL", help=f"path, short name or hub id{more}")
    parser.answers["--model"] = "MODEL stands without a flag"


def add_engine_flags(
    parser: argparse.ArgumentParser, help_of: Mapping[str, str] | None = None
) -> None:
    """One flag per field; MODEL is a positional argument of every verb.

    Args:
        help_of: a sentence for each field; `None`: its own.
    """
    add_field_flags(
        parser,
        EngineConfig,
        sections=SECTIONS,
        help_of=help_of or EngineConfig.field_help(),
        skip=("model",),
        note=NOTE,
    )


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """What was asked on the command line.

    Raises:
        ConfigError: a value is out of range.
    """
    return EngineConfig(model=arguments.model, **given_fields(arguments, EngineConfig))


def engine_options(config: EngineConfig) -> dict[str, object]:
    """The fields of `config` as keywords for `LLM`, the model left out."""
    return {name: getattr(config, name) for name in EngineConfig.field_help() if name != "model"}
