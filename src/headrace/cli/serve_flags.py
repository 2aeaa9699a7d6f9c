"""Flags of `headrace serve`: those of engine and server; the names that vLLM and SGLang have are
taken too.

A flag may also come from a YAML file (`--config FILE`) or from the environment (`HEADRACE_` and
the name of the option). All three become one command line, which is read once: the file first,
then the environment, then what was typed, so that the last one wins.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.cli.engine_flags import add_engine_flags
from headrace.cli.flags import add_field_flags, flag_of, given_fields
from headrace.cli.other_flags import ALIASES, ONLY, SWITCHES, in_our_names, meant
from headrace.config.engine_config import EngineConfig
from headrace.serving.server_config import ServerConfig

CONFIG_FLAG = "--config"
_FIELDS = (*fields(EngineConfig), *fields(ServerConfig))
OPTIONS = tuple(entry.name for entry in _FIELDS)

# First field of the server -> heading in `--help`.
SECTIONS = {
    "host": "server (address and keys)",
    "served_model_name": "server (requests and their bounds)",
    "log_level": "server (log)",
    "drain_seconds": "server (times, and the end)",
    "tool_call_parser": "server (tools and reasoning)",
    "ssl_certfile": "server (https, proxies, browsers)",
}
READERS = {
    name: {"type": str, "metavar": word}
    for word, names in {
        "ADDRESS": ("host",),
        "KEY": ("api_key", "admin_api_key"),
        "NAME,...": ("served_model_name",),
        "URL": ("otlp_traces_endpoint",),
        "FILE": ("ssl_certfile", "ssl_keyfile"),
        "PATH": ("root_path",),
        "ORIGIN,...": ("cors_origins",),
    }.items()
    for name in names
}

_SWITCHES = frozenset(entry.name for entry in _FIELDS if entry.type in (bool, bool | None))
_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="path, short name or hub id")
    parser.add_argument(
        "--model", dest="named_model", metavar="MODEL", help="the same, as a flag [--model-path]"
    )
    add_field_flags(
        parser,
        ServerConfig,
        sections=SECTIONS,
        help_of=_with_aliases(ServerConfig.field_help()),
        readers=READERS,
    )
    add_engine_flags(parser, _with_aliases(EngineConfig.field_help()))
    parser.add_argument_group("a file of options").add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help="YAML file of options, by the names of the flags; each may also be set as "
        "HEADRACE_NAME in the environment. What is typed wins over the environment, that over the "
        "file",
    )


def serve_engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """What was asked of the engine.

    Raises:
        ConfigError: a value is out of range, or no model is named.
    """
    model = arguments.model or arguments.named_model
    if model is None:
        raise ConfigError("No model is named", remedy="Give a path, a short name or a hub id")
    return EngineConfig(model=model, **given_fields(arguments, EngineConfig))


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """What was asked on the command line.

    Raises:
        ConfigError: a value is out of range.
    """
    return ServerConfig(**given_fields(arguments, ServerConfig))


def with_settings(arguments: Sequence[str]) -> list[str]:
    """The arguments of `serve` with those of file and environment before them, all in our names.

    Raises:
        ConfigError: the file cannot be read or names an unknown option, or a flag asks for
            something that is not here.
    """
    typed = list(arguments)
    file = _taken(typed, CONFIG_FLAG)
    flags: list[str] = []
    if file is not None:
        flags += _readable({f"{name} in {file}": ours for name, ours in _from_file(file).items()})
    flags += _readable(
        {env.variable_of(name): _flags(name, value) for name, value in env.options(OPTIONS).items()}
    )
    return [*flags, *in_our_names(typed)]


def _readable(settings: Mapping[str, list[str]]) -> list[str]:
    """The flags of all settings; one whose value cannot be read is told by where it stands."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_serve_flags(parser)
    for place, flags in settings.items():
        try:
            parser.parse_args(flags)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{place}: {error.message}") from None
    return [flag for flags in settings.values() for flag in flags]


def _taken(typed: list[str], flag: str) -> str | None:
    """Take a flag with its value out of the arguments; the last one counts."""
    value = None
    place = 0
    while place < len(typed) and typed[place] != "--":
        name, equals, given = typed[place].partition("=")
        if name != flag:
            place += 1
        elif equals:
            value = given
            del typed[place]
        elif place + 1 < len(typed):
            value = typed[place + 1]
            del typed[place : place + 2]
        else:
            raise ConfigError(f"{flag} needs a file")
    return value


def _from_file(path: str) -> dict[str, list[str]]:
    """What each line of the file asks for, as it would be typed."""
    import yaml  # a dependency of huggingface_hub

    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read", why=str(error)) from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} holds no options", remedy="Write lines like max_model_len: 4096")
    settings: dict[str, list[str]] = {}
    unknown: list[str] = []
    for key, value in read.items():
        name = _our_option(str(key))
        flag = flag_of(name)
        if name in OPTIONS:
            settings[name] = _flags(name, value)
        elif flag in SWITCHES or flag in ONLY:
            settings[name] = in_our_names(_flags_of_others(name, value))
        else:
            unknown.append(name)
    if unknown:
        raise ConfigError(
            f"{path} names unknown options: {', '.join(map(_answered, sorted(unknown)))}",
            remedy="headrace serve --help shows all, headrace serve --help WORD some",
        )
    return settings


def _answered(name: str) -> str:
    answer = meant(flag_of(name), [*map(flag_of, OPTIONS)])
    return f"{name} ({answer})" if answer else name


def _our_option(name: str) -> str:
    flag = flag_of(name)
    return ALIASES.get(flag, flag).removeprefix("--").replace("-", "_")


def _flags(name: str, value: Any) -> list[str]:
    """The option as it would be typed."""
    flag = flag_of(name)
    if value is None:
        return []
    if name in _SWITCHES:
        return [flag if _is_on(name, value) else flag.replace("--", "--no-", 1)]
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if isinstance(value, bool):  # YAML reads off and on so, and some options have these as words
        value = "on" if value else "off"
    return [f"{flag}={value}"]


def _flags_of_others(name: str, value: Any) -> list[str]:
    """A flag of another engine as it would be typed there."""
    flag = flag_of(name)
    if value is None:
        return []
    if flag in SWITCHES:
        return [flag] if _is_on(name, value) else []
    return [f"{flag}={value}"]


def _is_on(name: str, value: Any) -> bool:
    word = str(value).lower()
    if word not in (*_ON, *_OFF):
        raise ConfigError(f"{name} is {value!r}", remedy=f"Allowed: {', '.join((*_ON, *_OFF))}")
    return word in _ON


def _with_aliases(help_of: Mapping[str, str]) -> dict[str, str]:
    """The sentences, with the other names of each flag, so that a search finds those too."""
    return {name: sentence + _also(name) for name, sentence in help_of.items()}


def _also(name: str) -> str:
    flag = flag_of(name)
    either = {flag, flag.replace("--", "--no-", 1)}
    others = sorted(other for other, ours in ALIASES.items() if ours == flag)
    others += [other for other, ours in SWITCHES.items() if not either.isdisjoint(ours)]
    return f" [{', '.join(others)}]" if others else ""
