"""The argument parser of the command line: errors in one line, defaults in the help."""

import argparse
import sys
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn, TypeAlias

from headrace.base.shown import shown

FEW = 6  # flags that a line of usage names; more stand as FLAGS
SILENT = (None, False, (), argparse.SUPPRESS)  # defaults that say nothing


class HelpWithDefaults(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every flag that has one worth knowing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default == {} or any(action.default is each for each in SILENT)
        if silent or not action.option_strings:
            return action.help
        return (action.help or "") + default_text(action.default)

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None,
    ) -> str:
        """Of dozens of flags only that there are some: they are listed below, in groups."""
        needed = [each for each in actions if each.required or not each.option_strings]
        if usage is not None or len(list(actions)) - len(needed) <= FEW:
            return super()._format_usage(usage, actions, groups, prefix)
        text = super()._format_usage(None, needed, [], prefix)
        return text.replace(self._prog, f"{self._prog} [FLAGS]", 1)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = super()._fill_text(text, width, indent)
        return "\n".join(line.rstrip() for line in filled.splitlines())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser whose errors fit into a line; its sub-parsers are of the same kind.

    Args:
        searches: `--help WORD` shows the flags that have to do with WORD.

    Attributes:
        answers: flags that it has not -> what to type in their place.
    """

    def __init__(self, *, searches: bool = False, **options: Any) -> None:
        self.answers: dict[str, str] = {}
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

    @property
    def flags(self) -> list[str]:
        """Every way to write one of its flags."""
        return list(self._option_string_actions)

    def verb_with(self, flag: str) -> str:
        """The first verb below it that has a flag, as in "headrace generate"; "" where none has."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    found = verb.prog if flag in verb.flags else verb.verb_with(flag)
                    if found:
                        return str(found)
        return ""

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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(each) for each in action.choices]
        close = get_close_matches(str(value), choices, n=1)
        meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"no {action.metavar} {shown(value)}; {meant}")
        raise argparse.ArgumentError(action, f"{shown(value)} is not one of them; {meant}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"headrace: error: {message} (see {self.prog} --help)\n")


Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_verb(verbs: Verbs, name: str, meaning: str, place: str, **options: Any) -> Parser:
    """The parser of a verb, to give flags to.

    Args:
        place: "module:function" of this room, which runs it.
    """
    parser: Parser = verbs.add_parser(name, description=meaning, searches=True, **options)
    module, function = place.split(":")
    parser.set_defaults(module=module, function=function, parser=parser)
    return parser


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
    if isinstance(value, bool):
        value = "on" if value else "off"
    elif isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f" (default: {value})".replace("%", "%%")
