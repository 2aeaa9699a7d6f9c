"""The loop of a chat: lines in, streamed answers out, commands; whoever answers.

ctrl-c stops the answer, a second one the program; a line of standard input is a message, so
`echo hello | headrace chat smollm2` works too.
"""

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType

from headrace.base.errors import ConfigError, RequestError, TooLongError, UnavailableError

HELP = """\
/system TEXT  set the system message (without TEXT: show it)
/clear        forget the conversation (/reset too)
/exit         leave (/quit and ctrl-d too); ctrl-c stops an answer"""

FULL = "(the conversation is full: /clear forgets it; the message was not sent)"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A piece of an answer.

    Attributes:
        reasoning: what the model thought, where the server keeps that apart; it is no part of the
            conversation.
        finish_reason: with the last piece. message: what went wrong, where it is "error".
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Who answers.

    Attributes:
        answer: streams the answer to chat messages; closing it ends the answer. It raises
            RequestError or UnavailableError where there is none.
        stops_at_once: ctrl-c may interrupt it at any place; otherwise it ends with the next piece,
            so that a step is never torn.
    """

    answer: Callable[[list[dict[str, str]]], Generator[Said, None, None]]
    stops_at_once: bool = False


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


class Stopped(BaseException):
    """ctrl-c, raised wherever the answer is."""


class StopRequest:
    """Whether ctrl-c was pressed since the answer began."""

    def __init__(self, *, at_once: bool) -> None:
        self.pressed = False
        self._at_once = at_once

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the first ctrl-c is noted, or raises `Stopped`; the second ends the program."""
        self.pressed = False

        def note(_signal: int, _frame: FrameType | None) -> None:
            if self.pressed:
                raise KeyboardInterrupt
            self.pressed = True
            if self._at_once:
                raise Stopped

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def converse(speaker: Speaker, conversation: Conversation) -> None:
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
            _answer(speaker, conversation, line)


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
    if command in ("/clear", "/reset"):
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


def _answer(speaker: Speaker, conversation: Conversation, message: str) -> None:
    """Stream the answer to `message`; what was said before ctrl-c stays in the conversation."""
    conversation.add("user", message)
    stop, shown, ending = StopRequest(at_once=speaker.stops_at_once), _Shown(), ""
    try:
        with stop.listening(), closing(speaker.answer(conversation.messages)) as pieces:
            for piece in pieces:
                shown.add(piece)
                if piece.finish_reason == "length":
                    ending = "(cut at the length limit)"
                elif piece.finish_reason == "error":
                    ending = f"headrace: error: {piece.message}"
                elif piece.finish_reason == "abort":
                    ending = "(ended by the server)"
                if stop.pressed:
                    ending = "(stopped)"
                    break
    except Stopped:
        ending = "(stopped)"
    except (RequestError, UnavailableError) as error:
        conversation.turns.pop()  # it has no answer: do not send it again
        is_full = isinstance(error, TooLongError) and conversation.turns
        print(FULL if is_full else f"headrace: error: {error}", file=sys.stderr)
        return
    shown.end()
    if ending:
        print(ending, file=sys.stderr)
    conversation.add("assistant", shown.text)


class _Shown:
    """What is on the screen of an answer: its text, and before it dimly what was thought."""

    def __init__(self) -> None:
        self.text = ""
        self._thinks = False

    def add(self, piece: Said) -> None:
        if piece.reasoning:
            if not self._thinks:
                self._think(True)
            print(piece.reasoning, end="", file=sys.stderr, flush=True)
        if piece.text:
            self._think(False)
            self.text += piece.text
            print(piece.text, end="", flush=True)

    def end(self) -> None:
        self._think(False)
        print()

    def _think(self, thinks: bool) -> None:
        if thinks != self._thinks:
            code = (DIM if thinks else PLAIN) if sys.stderr.isatty() else ""
            print(code, end="" if thinks else "\n", file=sys.stderr, flush=True)
        self._thinks = thinks
