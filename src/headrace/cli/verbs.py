"""The verbs: what each is for, where it is, its flags."""

import argparse

from headrace.cli import bench_flags, chat, watch_flags
from headrace.cli.engine_flags import add_engine_flags, add_model
from headrace.cli.flags import integers
from headrace.cli.parser import Parser, Verbs, add_verb
from headrace.cli.sampling_flags import NOT_IN_CHAT, add_sampling_flags
from headrace.cli.serve_flags import add_serve_flags
from headrace.config.hardware import ASSUMED_HARDWARE
from headrace.version import __version__

# By what they are for; the order of `headrace --help`.
MEANINGS = {
    "run a model": {
        "serve": "serve a model over OpenAI's API",
        "generate": "complete prompts",
        "chat": "talk with a model, here or on a server",
    },
    "look inside": {
        "explain": "show every decision and the memory, without loading",
        "verify": "prove that paths and backends agree with float32 eager",
        "diff": "compare two dumps: the first layer that differs",
    },
    "measure": {
        "bench": "speed: offline, of steps, of starts, of any server",
    },
    "this installation": {
        "version": "versions of headrace and of what it runs on",
        "collect-env": "machine, drivers, packages, settings: for a report of a bug",
    },
}
EPILOG = """\
MODEL is a path (a folder with safetensors, a .gguf file), a short name
(smollm2, gemma3-270m) or a hub id (owner/name).

headrace VERB --help shows the flags of a verb, --help WORD those about a word.
"""


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="headrace",
        usage="headrace [-h] [--version] VERB ...",
        description="An engine that executes large language models and shows its work.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.add_argument_group("verbs", _listed())
    verbs = parser.add_subparsers(
        prog="headrace", metavar="verb", required=True, help=argparse.SUPPRESS
    )
    _serve(verbs)
    _generate(verbs)
    _chat(verbs)
    _explain(verbs)
    _verify(verbs)
    _diff(verbs)
    _bench(verbs)
    for name, place in (("version", "version:run"), ("collect-env", "collect_env:run")):
        _verb(verbs, name, place).add_argument("--json", action="store_true", help="as JSON")
    return parser


def _listed() -> str:
    """The verbs in their groups, with a sentence each."""
    width = max(len(name) for names in MEANINGS.values() for name in names)
    lines = []
    for title, names in MEANINGS.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {names[name]}" for name in names)]
    return "\n".join(lines[1:])


def _verb(verbs: Verbs, name: str, place: str) -> Parser:
    (meaning,) = (names[name] for names in MEANINGS.values() if name in names)
    return add_verb(verbs, name, meaning, place)


def _serve(verbs: Verbs) -> None:
    add_serve_flags(_verb(verbs, "serve", "serve:run"))


def _generate(verbs: Verbs) -> None:
    parser = _verb(verbs, "generate", "generate:run")
    add_model(parser)
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
    parser = _verb(verbs, "chat", "chat:run")
    chat.add_flags(parser)
    add_sampling_flags(parser, skip=NOT_IN_CHAT)
    add_engine_flags(parser)


def _explain(verbs: Verbs) -> None:
    parser = _verb(verbs, "explain", "explain:run")
    bench_flags.add_model_or_shape(parser)
    parser.add_argument(
        "--assume-gpu", metavar="NAME", help=f"plan for: {', '.join(ASSUMED_HARDWARE)}"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_engine_flags(parser)


def _verify(verbs: Verbs) -> None:
    parser = _verb(verbs, "verify", "verify:run")
    add_model(parser)
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


def _diff(verbs: Verbs) -> None:
    parser = _verb(verbs, "diff", "diff:run")
    parser.add_argument("ours", metavar="DUMP_A", help="folder of a dump, the measure")
    parser.add_argument("theirs", metavar="DUMP_B", help="folder of another")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _bench(verbs: Verbs) -> None:
    parser: Parser = verbs.add_parser("bench", description=MEANINGS["measure"]["bench"])
    bench_flags.add_kinds(parser)
