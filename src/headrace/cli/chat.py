"""`headrace chat MODEL` and `headrace chat --url URL`: a conversation that streams."""

import argparse
import sys
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.cli.conversation import Conversation, Said, Speaker, converse
from headrace.cli.flags import flag_of, given_fields
from headrace.cli.start import start
from headrace.config.engine_config import EngineConfig
from headrace.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those that are neither the engine's nor sampling."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="path, short name or hub id")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    group = parser.add_argument_group("a server, instead of MODEL")
    group.add_argument("--url", metavar="URL", help="any OpenAI-compatible server")
    group.add_argument(
        "--model",
        dest="served_model",
        metavar="NAME",
        help="the model's name there; by default the first listed",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="by default HEADRACE_API_KEY or OPENAI_API_KEY of the environment",
    )


def run(arguments: argparse.Namespace) -> int:
    given = given_fields(arguments, SamplingParams)
    SamplingParams(**given)  # out-of-range values show before the model loads
    conversation = Conversation(system=arguments.system)
    if arguments.url is not None:
        return _remote(arguments, conversation)
    if arguments.model is None or arguments.served_model or arguments.api_key:
        raise ConfigError(
            "headrace chat needs a MODEL, or the --url of a server",
            why="--model and --api-key belong to --url" if arguments.model else "",
            remedy="headrace chat smollm2, or headrace chat --url http://127.0.0.1:30000",
        )
    with start(arguments, chats=True) as llm:
        params = replace(llm.get_default_sampling_params(), **{"n": 1, **given})
        converse(_speaker(llm, params), conversation)
    return 0


def _speaker(llm: "LLM", params: SamplingParams) -> Speaker:
    def answer(messages: list[dict[str, str]]) -> Generator[Said, None, None]:
        pieces = llm.stream_chat(messages, params)
        try:
            for piece in pieces:
                yield Said(
                    text=piece.text, finish_reason=piece.finish_reason, message=piece.message
                )
        finally:
            if isinstance(pieces, Generator):
                pieces.close()  # aborts what still runs, now and not when it is collected

    return Speaker(answer=answer)


def _remote(arguments: argparse.Namespace, conversation: Conversation) -> int:
    from headrace.cli.chat_server import ChatServer, request_fields

    options = [flag_of(name) for name in given_fields(arguments, EngineConfig)]
    ours = options if arguments.model is None else [arguments.model, *options]
    if ours:
        raise ConfigError(
            f"--url goes without {', '.join(ours)}",
            why="the server has its own model and engine",
            remedy="Leave it out; --model names one of the server's models",
        )
    server = ChatServer(
        arguments.url,
        api_key=arguments.api_key or env.api_key(),
        model=arguments.served_model,
        fields=request_fields(given_fields(arguments, SamplingParams)),
    )
    print(f"{server.model} at {server.url}", file=sys.stderr, flush=True)
    converse(Speaker(answer=server.answer, stops_at_once=True), conversation)
    return 0
