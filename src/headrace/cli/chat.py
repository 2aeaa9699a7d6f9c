"""`headrace chat MODEL`: a conversation that streams.

ctrl-c stops the answer, a second one the program; a line of standard input is a message, so
`echo hello | headrace chat smollm2` works too.
"""

import argparse
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError, RequestError, TooLongError
from headrace.cli.flags import given_fields
from headrace.cli.start import start
from headrace.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM

HELP = """\
/system TEXT  set the system message (without TEXT: show it)
/clear        forget the conversation
/exit         leave (ctrl-d does too); ctrl-c stops an answer"""

FULL = "(the conversation is full: /clear forgets it; the message was not sent)"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The turns so far, the system message apart, since `/clear` keeps it."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.turns

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})


class StopRequest:
    """Whether ctrl-c was pressed since the answer began."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the first ctrl-c is noted, so that a step is never torn; the second raises."""
        self.pressed = False

        def note(_signal: int, _frame: FrameType | None) -> None:
            if self.pressed:
                raise KeyboardInterrupt
            self.pressed = True

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def run(arguments: argparse.Namespace) -> int:
    given = given_fields(arguments, SamplingParams)
    SamplingParams(**given)  # out-of-range values show before the model loads
    with start(arguments) as llm:
        if not llm.get_tokenizer().has_chat_template:
            raise RequestError(
                f"{arguments.model} has no chat template",
                why="it was not trained to answer",
                remedy=f"Use headrace generate {arguments.model} -p TEXT",
            )
        params = replace(llm.get_default_sampling_params(), **{"n": 1, **given})
        converse(llm, params, Conversation(system=arguments.system))
    return 0


def converse(llm: "LLM", params: SamplingParams, conversation: Conversation) -> None:
    """Read lines, answer messages, obey commands, until the end of input or `/exit`."""
    if sys.stdin is None:
        raise ConfigError("Standard input is closed", remedy="Chat reads its messages there")
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (importing it gives `input` history and editing)

        print(HELP, file=sys.stderr)
    for line in _read(interactive):
        if line.startswith("/"):
            if not _obey(line, conversation):
                return
        elif line:
            _answer(llm, params, conversation, line)


def _read(interactive: bool) -> Iterator[str]:
    if not interactive:
        for line in sys.stdin:
            yield line.strip()
        return
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or ctrl-d to leave)", file=sys.stderr)


def _obey(line: str, conversation: Conversation) -> bool:
    """Carry out a command; False when it ends the conversation."""
    command, _, rest = line.partition(" ")
    if command in ("/exit", "/quit"):
        return False
    if command == "/clear":
        conversation.turns.clear()
        print("(forgotten)", file=sys.stderr)
    elif command == "/system":
        if rest.strip():
            conversation.system = rest.strip()
        print(f"(system: {conversation.system or 'none'})", file=sys.stderr)
    else:
        if command != "/help":
            print(f"headrace: unknown command {command}", file=sys.stderr)
        print(HELP, file=sys.stderr)
    return True


def _answer(llm: "LLM", params: SamplingParams, conversation: Conversation, message: str) -> None:
    """Stream the answer to `message`; what was said before ctrl-c stays in the conversation."""
    conversation.add("user", message)
    stop, said, ending = StopRequest(), "", ""
    try:
        with stop.listening():
            pieces = llm.stream_chat(conversation.messages, params)
            for piece in pieces:
                said += piece.text
                print(piece.text, end="", flush=True)
                if piece.finish_reason == "length":
                    ending = "(cut at the length limit)"
                elif piece.finish_reason == "error":
                    ending = f"headrace: error: {piece.message}"
                if stop.pressed:
                    ending = "(stopped)"
                    break
            if isinstance(pieces, Generator):
                pieces.close()  # aborts what still runs, now and not when it is collected
    except RequestError as error:
        conversation.turns.pop()  # it can never be answered: do not send it again
        is_full = isinstance(error, TooLongError) and conversation.turns
        shown = FULL if is_full else f"headrace: error: {error}"
        print(shown, file=sys.stderr)
        return
    print()
    if ending:
        print(ending, file=sys.stderr)
    conversation.add("assistant", said)
