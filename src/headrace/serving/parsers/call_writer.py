"""Where the parser of a family puts the calls it reads."""

import secrets
import string
from collections.abc import Callable

from headrace.serving.parsers.events import CallArguments, CallEnded, CallStarted, Event
from headrace.serving.parsers.scanner import Scanner

_ALPHABET = string.ascii_letters + string.digits


def openai_id() -> str:
    """`call_` and 24 random letters and digits."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


def mistral_id() -> str:
    """9 random letters and digits: templates of Mistral refuse any other length."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class CallWriter:
    """Makes events of calls, whole or as they come.

    A call that turns out unreadable gives its text back; what a client has seen of it stays, so
    the record of the scanner goes on from there.

    Args:
        live: show name and arguments as they come; otherwise a call once it is complete.
        most: calls beyond so many are left out.
    """

    def __init__(
        self,
        scanner: Scanner,
        out: Callable[[Event], None],
        *,
        make_id: Callable[[], str],
        live: bool,
        most: int | None,
    ) -> None:
        self._scanner, self._out, self._make_id = scanner, out, make_id
        self._live, self._most = live, most
        self._waiting: list[Event] = []
        self._is_open = False
        self.count = 0

    @property
    def shown(self) -> int:
        """Calls that a client has seen something of."""
        return self.count + (self._is_open and self._live)

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call of this tool begins. `call_id`: the one the model wrote."""
        self._is_open = True
        self._show(CallStarted(self.count, call_id or self._make_id(), name))

    def arguments(self, text: str) -> None:
        """More JSON text of its arguments."""
        if text:
            self._show(CallArguments(self.count, text))

    def end(self) -> None:
        """The call is complete."""
        self._show(CallEnded(self.count))
        for event in self._waiting:
            self._send(event)
        self._waiting = []
        self._is_open = False
        self.count += 1
        self._scanner.record()

    def give_up(self) -> str:
        """The call is unreadable; the text of it that no client has seen."""
        unseen = self._scanner.recorded()
        if self._is_open and self._live:
            self._send(CallEnded(self.count))
            self.count += 1
        self._waiting = []
        self._is_open = False
        return unseen

    def _show(self, event: Event) -> None:
        if self._live:
            self._send(event)
            self._scanner.record()
        else:
            self._waiting.append(event)

    def _send(self, event: Event) -> None:
        if self._most is None or self.count < self._most:
            self._out(event)
