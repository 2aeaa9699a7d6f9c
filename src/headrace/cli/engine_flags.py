"""Flags of `EngineConfig`."""

import argparse

from headrace.cli.flags import add_field_flags, given_fields
from headrace.config.engine_config import EngineConfig


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field; MODEL is a positional argument of every verb."""
    add_field_flags(
        parser,
        EngineConfig,
        title="engine",
        help_of=EngineConfig.field_help(),
        skip=("model",),
        note="What has no default, or auto, follows from model and device: headrace explain MODEL.",
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
