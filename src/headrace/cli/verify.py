"""`headrace verify MODEL`: a table of configurations against the reference; exit status 0 or 1."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ConfigError
from headrace.base.layout import output_width, tell
from headrace.base.shown import shown
from headrace.cli.engine_flags import engine_config
from headrace.cli.prompt_file import prompt_lines

if TYPE_CHECKING:
    from headrace.testing.workload import OwnPrompt

FAILED = 1
STDOUT = "-"
FORMS = (
    'Write a text, token ids like [5, 7], {"prompt": text or ids} or {"messages": [...]}, the last '
    'two with "max_tokens" if you like'
)


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    if arguments.json is not None and arguments.json == arguments.html:
        place = "standard output" if arguments.json == STDOUT else shown(arguments.json)
        raise ConfigError(f"--json and --html both go to {place}", remedy="Name two files")
    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    for file in (arguments.json, arguments.html):
        check_writable(file)
    # imports torch, so only after the arguments were checked
    from headrace.testing.verify import verify
    from headrace.testing.verify_page import page_of
    from headrace.testing.verify_table import render

    report = verify(
        config,
        prompts=prompts,
        every_combination=arguments.assume == "nothing",
        deep=arguments.deep,
        tell=tell,
    )
    if STDOUT not in (arguments.json, arguments.html):
        # First: what took minutes is seen, whatever becomes of the files.
        print(render(report, output_width()))
    if arguments.json is not None:
        _write(arguments.json, json.dumps(report.as_dict(), indent=1) + "\n")
    if arguments.html is not None:
        _write(arguments.html, page_of(report))
    return 0 if report.passed else FAILED


def check_writable(file: str | None) -> None:
    """Raises `ConfigError` now, where a file cannot be written, and not after minutes."""
    if file is None or file == STDOUT:
        return
    path = Path(file).absolute()
    if not path.parent.is_dir():
        why = "its folder is not there"
    elif not file or path.is_dir():
        why = "it is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "this process may not write there"
    else:
        return
    raise ConfigError(f"{shown(file)} cannot be written", why=why, remedy="Name another file")


def _write(file: str, text: str) -> None:
    if file == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{shown(file)} cannot be written", why=str(error), remedy="Name another file"
        ) from None


def read_prompts(file: str) -> "list[OwnPrompt]":
    """One prompt per line; see `FORMS`.

    Raises:
        ConfigError: the file cannot be read, holds no prompt, or a line is none; names it.
    """
    return [_prompt(line, f"{file}: {line[:60]}") for line in prompt_lines(file)]


def _prompt(line: str, place: str) -> "OwnPrompt":
    from headrace.testing.workload import OwnPrompt

    if not line.startswith("{"):
        return OwnPrompt(prompt=_ids(_json(line)) or line)
    entry = _json(line)
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} is no JSON", remedy=FORMS)
    unknown = sorted(set(entry) - {"prompt", "messages", "max_tokens"})
    if unknown:
        raise ConfigError(f"{place} has {', '.join(unknown)}", remedy=FORMS)
    if ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f"{place} needs either prompt or messages", remedy=FORMS)
    most = entry.get("max_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{place}: max_tokens is {most}", why="it is a number from 1 on")
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not all(isinstance(part, dict) for part in messages):
            raise ConfigError(f"{place}: messages are a list of objects", remedy=FORMS)
        return OwnPrompt(messages=messages, max_tokens=most)
    prompt = entry["prompt"]
    if not isinstance(prompt, str) and not _ids(prompt):
        raise ConfigError(f"{place}: its prompt is neither text nor ids", remedy=FORMS)
    return OwnPrompt(prompt=prompt, max_tokens=most)


def _json(text: str) -> Any:
    """What a line says as JSON; `None` where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _ids(values: Any) -> list[int] | None:
    if not isinstance(values, list) or not values:
        return None
    return values if all(type(value) is int for value in values) else None
