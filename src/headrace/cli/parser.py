"""The argument parser of the command line: errors in one line, defaults in the help."""

import argparse
import sys
from typing import Any, NoReturn

SILENT = (None, False, (), argparse.SUPPRESS)  # defaults that say nothing


class HelpWithDefaults(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every flag that has one worth knowing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.option_strings or any(action.default is silent for silent in SILENT):
            return action.help
        return (action.help or "") + default_text(action.default)


class Parser(argparse.ArgumentParser):
    """A parser whose errors fit into a line; its sub-parsers are of the same kind.

    Args:
        searches: `--help WORD` shows the flags that have to do with WORD.
    """

    def __init__(self, *, searches: bool = False, **options: Any) -> None:
        super().__init__(
            formatter_class=HelpWithDefaults, allow_abbrev=False, add_help=not searches, **options
        )
        if searches:
            self.add_argument(
                "-h",
                "--help",
                nargs="?",
                metavar="WORD",
                action=_Search,
                default=argparse.SUPPRESS,
                help="show this, or only the flags about WORD",
            )

    def format_matching(self, word: str) -> str:
        """The flags whose name or sentence holds `word`, in their groups; "" when none does."""
        wanted, formatter = word.lower().lstrip("-").replace("_", "-"), self._get_formatter()
        for group in self._action_groups:
            found = [each for each in group._group_actions if _is_about(each, wanted)]
            if found:
                formatter.start_section(group.title)
                formatter.add_arguments(found)
                formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"headrace: error: {message} (see {self.prog} --help)\n")


class _Search(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        if values is None:
            parser.print_help()
            parser.exit()
        matching = parser.format_matching(values)
        if not matching:
            parser.exit(2, f"headrace: error: no flag is about {values!r} (see {parser.prog} -h)\n")
        parser._print_message(matching, sys.stdout)
        parser.exit()


def _is_about(action: argparse.Action, word: str) -> bool:
    told = f"{' '.join(action.option_strings)} {action.metavar or ''} {action.help or ''}".lower()
    return word in told or word.replace("-", " ") in told


def default_text(value: object) -> str:
    """(default: 1,32), with its percent signs escaped, to stand behind a sentence of help."""
    shown = value
    if isinstance(value, bool):
        shown = "on" if value else "off"
    elif isinstance(value, tuple):
        shown = ",".join(map(str, value))
    return f" (default: {shown})".replace("%", "%%")
