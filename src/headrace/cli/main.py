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
from typing import TypeAlias

from headrace.base import env
from headrace.base.errors import HeadraceError
from headrace.base.log import log_to_stderr
from headrace.cli import bench_serve, chat, watch_flags
from headrace.cli.engine_flags import add_engine_flags
from headrace.cli.flags import at_least_two, integers, positive, positives, whole, with_dashes
from headrace.cli.other_flags import meant
from headrace.cli.parser import Parser
from headrace.cli.sampling_flags import NOT_IN_CHAT, add_sampling_flags
from headrace.cli.serve_flags import OPTIONS, add_serve_flags, with_settings
from headrace.config.hardware import ASSUMED_HARDWARE
from headrace.request.sampling_params import HIDDEN_STATES
from headrace.version import __version__

ERROR, INTERRUPTED = 2, 130
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a write to our output
EPILOG = """\
MODEL is a path (a folder with safetensors, a .gguf file), a short name (smollm2, gemma3-270m)
or a hub id (owner/name). `headrace VERB --help` shows the flags of a verb.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 after an error, 130 after ctrl-c."""
    parser = build_parser()
    given = with_dashes(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help()
        return 0
    if given[0] == "serve":
        try:
            given[1:] = with_settings(given[1:])
        except HeadraceError as error:
            print(f"headrace: error: {error}", file=sys.stderr)
            return ERROR
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        known = list(parsed.parser._option_string_actions)
        parsed.parser.error(f"unknown: {' '.join(_answered(word, known) for word in unknown)}")
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


def _answered(word: str, known: Sequence[str]) -> str:
    """A word that a verb does not know; if it is a flag, with what to type in its place."""
    answer = meant(word.partition("=")[0], known) if word.startswith("--") else ""
    return f"{word} ({answer})" if answer else word


def _replace_what_cannot_be_shown() -> None:
    """A character that the output's encoding lacks becomes `?`, and no error after the work."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> Parser:
    parser = Parser(
        prog="headrace",
        description="An engine that executes large language models and shows its work.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _serve(verbs)
    _generate(verbs)
    _chat(verbs)
    _explain(verbs)
    _verify(verbs)
    _bench(verbs)
    diff = _verb(verbs, "diff", "compare two dumps: the first layer that differs", "diff:run")
    diff.add_argument("ours", metavar="DUMP_A", help="folder of a dump, the measure")
    diff.add_argument("theirs", metavar="DUMP_B", help="folder of another")
    diff.add_argument("--json", action="store_true", help="as JSON")
    version = _verb(
        verbs, "version", "print the versions of headrace and of what it runs on", "version:run"
    )
    version.add_argument("--json", action="store_true", help="as JSON")
    meaning = "show machine, drivers, packages and settings, for a report of a bug"
    collect_env = _verb(verbs, "collect-env", meaning, "collect_env:run")
    collect_env.add_argument("--json", action="store_true", help="as JSON")
    return parser


Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


def _verb(verbs: Verbs, name: str, meaning: str, place: str) -> Parser:
    parser: Parser = verbs.add_parser(name, help=meaning, description=meaning, searches=True)
    module, function = place.split(":")
    parser.set_defaults(module=module, function=function, parser=parser)
    return parser


def _serve(verbs: Verbs) -> None:
    parser = _verb(verbs, "serve", "serve a model over OpenAI's API", "serve:run")
    add_serve_flags(parser)


def _generate(verbs: Verbs) -> None:
    parser = _verb(verbs, "generate", "complete prompts", "generate:run")
    _model(parser)
    source = parser.add_argument_group("prompts, one of (else standard input is one prompt)")
    source.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="a prompt; repeat")
    source.add_argument(
        "--prompt-ids",
        action="append",
        type=integers,
        metavar="ID,ID,...",
        help="a prompt as token ids; repeat",
    )
    source.add_argument("-f", "--prompt-file", metavar="FILE", help="one prompt per line")
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt through the chat template"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per output")
    parser.add_argument("--stats", action="store_true", help="tokens/s and paths taken, at the end")
    watch_flags.add_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)


def _chat(verbs: Verbs) -> None:
    parser = _verb(verbs, "chat", "talk with a model, here or on a server", "chat:run")
    chat.add_flags(parser)
    add_sampling_flags(parser, skip=NOT_IN_CHAT)
    add_engine_flags(parser)


def _explain(verbs: Verbs) -> None:
    parser = _verb(
        verbs, "explain", "show every decision and the memory, without loading", "explain:run"
    )
    _model(parser)
    parser.add_argument(
        "--assume-gpu", metavar="NAME", help=f"plan for: {', '.join(ASSUMED_HARDWARE)}"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_engine_flags(parser)


def _verify(verbs: Verbs) -> None:
    parser = _verb(
        verbs, "verify", "prove that paths and backends agree with float32 eager", "verify:run"
    )
    _model(parser)
    parser.add_argument(
        "--assume",
        choices=("pairs", "nothing"),
        default="pairs",
        help="pairs: faults need at most two settings to come together, so a few combinations "
        "hold every pair; nothing: run every combination",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt per line: a text, token ids like [5, 7], or JSON with prompt or messages, "
        "and max_tokens; a short text, cut around the borders of pages, by default",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="find the first layer that diverges where a configuration fails",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="all that was found; - in place of the table"
    )
    parser.add_argument("--html", metavar="FILE", help="a page with plots, complete in itself")
    add_engine_flags(parser)


def _bench(verbs: Verbs) -> None:
    bench: Parser = verbs.add_parser("bench", help="measure")
    kinds = bench.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    parser = _verb(kinds, "offline", "many prompts at once, no server", "bench:offline")
    _model(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--num-prompts",
        type=positives,
        default=(16,),
        metavar="N,N,...",
        help="prompts of random token ids; a run for each number",
    )
    for name, default, meaning in (
        ("input-len", 128, "tokens of a prompt, the shared prefix included"),
        ("output-len", 128, "tokens made for each prompt"),
        ("batch", None, "prompts handed over at a time; all by default"),
        ("first-token-len", None, "time one prompt of so many tokens to its first token, too"),
        ("repeats", 3, "runs; medians are shown"),
    ):
        load.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=meaning)
    load.add_argument(
        "--shared-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="leading tokens that all prompts share and that are cached before the run",
    )
    load.add_argument("--load-seed", type=whole, default=0, metavar="N", help="seed of the prompts")
    load.add_argument(
        "--against", choices=("transformers",), help="do the same work with a peer in the same run"
    )
    _measured(load)
    add_engine_flags(parser)
    _bench_step(kinds)
    _bench_startup(kinds)
    parser = _verb(kinds, "serve", "load on any OpenAI-compatible server", "bench_serve:run")
    bench_serve.add_flags(parser)
    parser = _verb(kinds, "ceilings", "bandwidth and matrix rate of the device", "bench:ceilings")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of the product")
    _measured(parser)
    parser = _verb(kinds, "plot", "draw time against floor from JSON lines", "bench:plot")
    parser.add_argument("files", nargs="+", metavar="FILE", help="written by bench step --json")
    parser.add_argument("-o", "--output", required=True, metavar="PNG", help="the picture")


def _bench_step(kinds: Verbs) -> None:
    parser = _verb(kinds, "step", "decode steps and prefills beside their floors", "bench:step")
    _model(parser)
    work = parser.add_argument_group("work")
    for name, several, meaning in (
        ("batch", (1, 32, 128, 256), "sequences of a decode step"),
        ("prefill", (1, 32), "prompts read at once to their first token"),
    ):
        work.add_argument(
            f"--{name}", type=positives, default=several, metavar="N,N,...", help=meaning
        )
    for name, default, least, meaning in (
        ("context", 1024, positive, "tokens of a prompt"),
        ("output-len", 64, at_least_two, "tokens of the long run; the short one makes 1"),
        ("repeats", 3, positive, "pairs of runs; medians are shown"),
        ("trace-turns", 20, whole, "steps under the profiler, on a GPU; 0: none"),
    ):
        work.add_argument(f"--{name}", type=least, default=default, metavar="N", help=meaning)
    work.add_argument(
        "--mixed",
        action="store_true",
        help="trace once more with a row of top-p and a row of logprobs",
    )
    work.add_argument(
        "--hidden-states",
        choices=HIDDEN_STATES,
        default="none",
        help="steady turns too in which every row asks for hidden states",
    )
    _measured(work)
    add_engine_flags(parser)


def _bench_startup(kinds: Verbs) -> None:
    parser = _verb(
        kinds, "startup", "fresh processes to the first token, cold and warm", "bench:startup"
    )
    _model(parser)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--input-len", type=positive, default=128, metavar="N", help="tokens of the prompt"
    )
    work.add_argument(
        "--repeats", type=positive, default=1, metavar="N", help="warm starts after the cold one"
    )
    work.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on until every decode graph is captured",
    )
    work.add_argument("--json", action="store_true", help="one JSON line per start")
    add_engine_flags(parser)


def _measured(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--threads", type=positive, metavar="N", help="torch threads")
    parser.add_argument("--json", action="store_true", help="one JSON line per measurement")


def _model(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="path, short name or hub id")


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
