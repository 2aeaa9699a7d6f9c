"""Flags of `headrace bench serve`."""

import argparse
import json
import math
from typing import Any

from headrace.cli.flags import positive, whole

GOALS = ("ttft", "tpot", "e2el")
VOCAB_SIZE = 10_000  # ids below it are in nearly every vocabulary


def add_flags(parser: argparse.ArgumentParser) -> None:
    _server_flags(parser.add_argument_group("server"))
    _load_flags(parser.add_argument_group("load"))
    _prompt_flags(parser.add_argument_group("prompts"))
    _output_flags(parser.add_argument_group("output"))


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:30000",
        metavar="URL",
        help="any OpenAI-compatible server, with or without /v1",
    )
    group.add_argument(
        "--endpoint",
        type=_endpoint,
        choices=("completions", "chat"),
        default="completions",
        help="which route; /v1/completions and /v1/chat/completions are taken too",
    )
    group.add_argument(
        "--model", metavar="NAME", help="its name there; by default the first listed"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="by default HEADRACE_API_KEY or OPENAI_API_KEY of the environment",
    )
    group.add_argument(
        "--wait", type=whole, default=0, metavar="SECONDS", help="for a server that starts"
    )
    group.add_argument(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help="most a request may take; any by default",
    )
    group.add_argument(
        "--flush-cache",
        action="store_true",
        help="POST /flush_cache before each run (an admin route with our server)",
    )


def _endpoint(text: str) -> str:
    return {"/v1/completions": "completions", "/v1/chat/completions": "chat"}.get(text, text)


def _load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-prompts", type=positive, metavar="N", help="requests; 100, or all of a file"
    )
    group.add_argument(
        "--request-rate",
        type=rates,
        default="inf",
        metavar="X,X,...",
        help="mean requests a second (Poisson), or inf: all at once; a run for each",
    )
    group.add_argument(
        "--max-concurrency",
        type=concurrencies,
        default="any",
        metavar="N,N,...",
        help="most requests at once, or any; a run for each",
    )
    group.add_argument(
        "--warm-up", type=whole, default=1, metavar="N", help="requests before, not measured"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for the full output length (not a field of OpenAI's own)",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of sampling")
    group.add_argument(
        "--extra-body", type=_body, default={}, metavar="JSON", help="more fields of every request"
    )


def _prompt_flags(group: argparse._ArgumentGroup) -> None:
    for name, default, meaning in (
        ("input-len", "128", "tokens of a prompt, the shared prefix included"),
        ("output-len", "128", "tokens to make"),
    ):
        group.add_argument(
            f"--{name}",
            f"--random-{name}",
            type=lengths,
            default=default,
            metavar="N or N-N",
            help=f"{meaning}; a range draws evenly",
        )
    group.add_argument(
        "--shared-prefix-len",
        type=whole,
        default=0,
        metavar="N",
        help="leading tokens that the prompts of a group share",
    )
    group.add_argument(
        "--prefix-groups", type=positive, default=1, metavar="N", help="different shared prefixes"
    )
    group.add_argument(
        "--prompts",
        choices=("ids", "text"),
        help="random token ids, or common words, about a token each; ids where the endpoint "
        "takes them",
    )
    group.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help=f"random ids are below it; what the server tells, else {VOCAB_SIZE}",
    )
    group.add_argument(
        "--prompt-file",
        metavar="JSONL",
        help='instead of random ones, lines with "prompt" (text or ids) or "messages", and '
        '"max_tokens" where a prompt has its own',
    )
    group.add_argument(
        "--load-seed",
        type=whole,
        metavar="N",
        help="of lengths, prompts and arrivals; a fresh one by default, since a second run with "
        "the same prompts would find them in the server's prefix cache",
    )


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="one JSON line per run")
    group.add_argument("--output-file", metavar="JSONL", help="add a line per run to this file")
    group.add_argument(
        "--output-details", action="store_true", help="with every request's times in those lines"
    )
    group.add_argument(
        "--plot", metavar="PNG", help="a run over time, or several runs as a curve (matplotlib)"
    )
    group.add_argument(
        "--goodput",
        type=goals,
        default={},
        metavar="ttft:MS,...",
        help=f"count the requests within these milliseconds; {', '.join(GOALS)}",
    )


def rates(text: str) -> tuple[float, ...]:
    """1,2.5,inf"""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(rate > 0 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates like 1,2.5,inf")
    return found


def concurrencies(text: str) -> tuple[int | None, ...]:
    """1,8,any"""
    return tuple(None if part == "any" else positive(part) for part in text.split(","))


def lengths(text: str) -> tuple[int, int]:
    """128, or 64-256"""
    least, dash, most = text.partition("-")
    found = (positive(least), positive(most if dash else least))
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range like 64-256")
    return found


def goals(text: str) -> dict[str, float]:
    """ttft:200,tpot:50"""
    try:
        found = {
            name: float(value) for name, value in (part.split(":") for part in text.split(","))
        }
    except ValueError:
        found = {"": 0.0}
    if not all(name in GOALS and value > 0 for name, value in found.items()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of {', '.join(GOALS)} with milliseconds like ttft:200,tpot:50"
        )
    return found


def _body(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found
