"""Flags that have the steps of a run profiled or dumped."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from headrace.cli.flags import integers, positive

if TYPE_CHECKING:
    from headrace.llm import LLM

NAMES = ("k", "v", "logits", "stream")


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
        default=NAMES[:3],
        help="which; stream needs --dump-eager",
    )
    group.add_argument("--dump-steps", type=positive, metavar="N", help="how many; all by default")
    group.add_argument("--dump-eager", action="store_true", help="run every step eagerly meanwhile")


@contextmanager
def watching(llm: "LLM", arguments: argparse.Namespace) -> Iterator[None]:
    """Within: what the flags ask for.

    Raises:
        RequestError: it cannot be had, or not be written.
    """
    with ExitStack() as stack:
        if arguments.profile is not None:
            llm.start_profile(arguments.profile)
            stack.callback(llm.stop_profile)
        if arguments.dump_folder is not None:
            stack.enter_context(
                llm.dump(
                    arguments.dump_folder,
                    layers=arguments.dump_layers,
                    names=arguments.dump_names,
                    steps=arguments.dump_steps,
                    eager=arguments.dump_eager,
                )
            )
        yield
