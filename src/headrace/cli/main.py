"""`headrace VERB MODEL ...`: reads the command line, calls the verb, shows errors in one line.

A verb's room is imported when the verb runs: `headrace --help` imports no torch.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from headrace.base import env
from headrace.base.errors import HeadraceError
from headrace.base.log import log_to_stderr
from headrace.cli.flags import with_dashes
from headrace.cli.other_flags import in_our_names, meant
from headrace.cli.parser import Parser
from headrace.cli.serve_flags import OPTIONS, with_settings
from headrace.cli.verbs import build_parser

ERROR, INTERRUPTED = 2, 130
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a write to our output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 after an error, 130 after ctrl-c."""
    _open_what_is_closed()
    parser = build_parser()
    given = with_dashes(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help()
        return 0
    try:
        if given[0] == "serve":
            given[1:] = with_settings(given[1:])
        elif given[:2] != ["bench", "serve"]:  # which has no engine
            given = in_our_names(given)
    except HeadraceError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return ERROR
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        parsed.parser.error(f"unknown: {_unknown(unknown, parsed.parser, parser)}")
    debug = False
    _replace_what_cannot_be_shown()
    try:
        level = env.log_level()
        debug = level == "debug"
        log_to_stderr(level)
        _warn_of_unknown_variables()
        verb: Callable[[argparse.Namespace], int] = getattr(
            import_module(f"headrace.cli.{parsed.module}"), parsed.function
        )
        status = verb(parsed)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be told
        return status
    except HeadraceError as error:
        if debug:
            raise
        print(f"headrace: error: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`): say nothing more, not even at exit.
        _drop_output()
        return 1
    except OSError as error:
        if debug or error.errno not in UNWRITABLE or error.filename is not None:
            raise
        print(f"headrace: error: The output cannot be written. {error}.", file=sys.stderr)
        _drop_output()
        return ERROR


def _unknown(words: Sequence[str], verb: Parser, every: Parser) -> str:
    """What a verb does not know, with what to type in its place."""
    if not words[0].startswith("-") and "--prompt" in verb.flags:
        return f"{' '.join(words)} (a prompt comes after -p)"
    return " ".join(_answered(word, verb, every) for word in words)


def _answered(word: str, verb: Parser, every: Parser) -> str:
    """A word that a verb does not know; if it is a flag, with what to type in its place."""
    if not word.startswith("-"):
        return word
    flag = word.partition("=")[0]
    other = every.verb_with(flag)
    answer = verb.answers.get(flag) or (f"{other} has it" if other else meant(flag, verb.flags))
    return f"{word} ({answer})" if answer else word


def _replace_what_cannot_be_shown() -> None:
    """A character that the output's encoding lacks becomes `?`, and no error after the work."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _open_what_is_closed() -> None:
    """A stream that whoever started us has closed leads nowhere: else its number would go to the
    next file or socket, and what libraries print would end up there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free: this one. Children have it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn_of_unknown_variables() -> None:
    for name in env.unknown_variables(OPTIONS):
        known = ", ".join(env.VARIABLES)
        print(
            f"headrace: warning: {name} means nothing here; known: {known}, and each option of "
            "headrace serve",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
