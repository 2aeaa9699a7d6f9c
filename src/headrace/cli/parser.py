"""The argument parser of the command line: errors in one line, defaults in the help."""

import argparse
from typing import Any, NoReturn

SILENT = (None, False, (), argparse.SUPPRESS)  # defaults that say nothing


class HelpWithDefaults(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every flag that has one worth knowing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.option_strings or any(action.default is silent for silent in SILENT):
            return action.help
        return (action.help or "") + default_text(action.default)


class Parser(argparse.ArgumentParser):
    """A parser whose errors fit into a line; its sub-parsers are of the same kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpWithDefaults, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"headrace: error: {message} (see {self.prog} --help)\n")


def default_text(value: object) -> str:
    """(default: 1,32), with its percent signs escaped, to stand behind a sentence of help."""
    shown = value
    if isinstance(value, bool):
        shown = "on" if value else "off"
    elif isinstance(value, tuple):
        shown = ",".join(map(str, value))
    return f" (default: {shown})".replace("%", "%%")
