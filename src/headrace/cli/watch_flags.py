"""Flags that have the steps of a run profiled or dumped."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError, RequestError
from headrace.base.folders import made_folder
from headrace.cli.flags import flag_of, integers, positive

if TYPE_CHECKING:
    from headrace.llm import LLM

NAMES = ("k", "v", "logits", "stream")
USUAL = NAMES[:3]
OF_A_DUMP = ("dump_layers", "dump_names", "dump_steps", "dump_eager")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watching")
    group.add_argument("--profile", metavar="FOLDER", help="profile the steps into a Chrome trace")
    group.add_argument("--dump-folder", metavar="FOLDER", help="dump tensors of the steps")
    group.add_argument(
        "--dump-layers", type=integers, metavar="N,N,...", help="whose tensors; all by default"
    )
    group.add_argument(
        "--dump-names",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"which of {' '.join(NAMES)}, {' '.join(USUAL)} by default; stream needs --dump-eager",
    )
    group.add_argument("--dump-steps", type=positive, metavar="N", help="how many; all by default")
    group.add_argument("--dump-eager", action="store_true", help="run every step eagerly meanwhile")


def check(arguments: argparse.Namespace) -> None:
    """Before the model loads. Raises `HeadraceError` for folders that cannot be written, and for
    flags of a dump that nobody asked for."""
    if arguments.profile is not None:
        made_folder(arguments.profile, "The profile")
    if arguments.dump_folder is not None:
        made_folder(arguments.dump_folder, "The dump")
        return
    given = [name for name in OF_A_DUMP if getattr(arguments, name) not in (None, False)]
    if given:
        flags = ", ".join(map(flag_of, given))
        raise ConfigError(f"{flags} came without --dump-folder", remedy="Name the dump's folder")


@contextmanager
def watching(llm: "LLM", arguments: argparse.Namespace) -> Iterator[None]:
    """Within: what the flags ask for; then it says on stderr where that is.

    Raises:
        RequestError: it cannot be had, or not be written.
    """
    with ExitStack() as stack:
        if arguments.profile is not None:
            llm.start_profile(arguments.profile)
            stack.push(partial(_stop_profile, llm))
        if arguments.dump_folder is not None:
            stack.enter_context(
                llm.dump(
                    arguments.dump_folder,
                    layers=arguments.dump_layers,
                    names=arguments.dump_names or USUAL,
                    steps=arguments.dump_steps,
                    eager=arguments.dump_eager,
                )
            )
        yield
    if arguments.dump_folder is not None:
        print(f"dump: {arguments.dump_folder}", file=sys.stderr)


def _stop_profile(llm: "LLM", _: object, error: BaseException | None, trace: object) -> None:
    """What was raised within, if anything was, matters more than that no profile came of it."""
    try:
        print(f"profile: {llm.stop_profile()['path']}", file=sys.stderr)
    except RequestError as failure:
        if error is None:
            raise
        print(f"headrace: {failure}", file=sys.stderr)
