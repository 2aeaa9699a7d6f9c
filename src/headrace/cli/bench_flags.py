"""The benchmarks below `headrace bench`: where each is, and its flags."""

import argparse

from headrace.bench.shapes import shape_names
from headrace.cli import bench_serve_flags
from headrace.cli.engine_flags import add_engine_flags, add_model
from headrace.cli.flags import at_least_two, positive, positives, whole
from headrace.cli.other_flags import OF_BENCH_SERVE
from headrace.cli.parser import Parser, Verbs, add_verb
from headrace.request.sampling_params import HIDDEN_STATES


def add_kinds(bench: Parser) -> None:
    """A parser for each benchmark."""
    kinds = bench.add_subparsers(
        prog="headrace bench", title="benchmarks", metavar="benchmark", required=True
    )
    _offline(kinds)
    _step(kinds)
    _startup(kinds)
    parser = _kind(kinds, "serve", "load on any OpenAI-compatible server", "bench_serve:run")
    bench_serve_flags.add_flags(parser)
    parser.answers |= OF_BENCH_SERVE
    _ceilings(kinds)
    parser = _kind(kinds, "plot", "draw time against floor from JSON lines", "bench:plot")
    parser.add_argument("files", nargs="+", metavar="FILE", help="written by bench step --json")
    parser.add_argument("-o", "--output", required=True, metavar="PNG", help="the picture")


def _kind(kinds: Verbs, name: str, meaning: str, place: str) -> Parser:
    return add_verb(kinds, name, meaning, place, help=meaning)


def add_model_or_shape(parser: Parser) -> None:
    """MODEL where it needs no weights."""
    add_model(parser, f"; or a shape: {', '.join(shape_names())}")


def _measured(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--threads", type=positive, metavar="N", help="torch threads")
    parser.add_argument("--json", action="store_true", help="one JSON line per measurement")


def _offline(kinds: Verbs) -> None:
    parser = _kind(kinds, "offline", "many prompts at once, no server", "bench:offline")
    add_model_or_shape(parser)
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


def _step(kinds: Verbs) -> None:
    parser = _kind(kinds, "step", "decode steps and prefills beside their floors", "bench:step")
    add_model_or_shape(parser)
    work = parser.add_argument_group("work")
    for name, several, meaning in (
        ("batch", (1, 32, 128, 256), "sequences of a decode step"),
        (
            "prefill",
            None,
            "prompts read at once to their first token; 1, and 32 where a batch has as many",
        ),
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


def _startup(kinds: Verbs) -> None:
    parser = _kind(
        kinds, "startup", "fresh processes to the first token, cold and warm", "bench:startup"
    )
    add_model_or_shape(parser)
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


def _ceilings(kinds: Verbs) -> None:
    parser = _kind(kinds, "ceilings", "bandwidth and matrix rate of the device", "bench:ceilings")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of the product")
    _measured(parser)
