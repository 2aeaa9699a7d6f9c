"""Reads the text of one answer: reasoning, content and tool calls, as events.

White space: reasoning comes without white space at its ends and content without any before it if
reasoning came first. In families whose template sets calls off with white space, that too is left
out; elsewhere, and inside arguments, it stays as written.

Broken calls: text that begins like a call and is none (cut off, not JSON) is given out as content,
marker and all, so that nothing is lost; only a marker with nothing after it at the end of the
answer is left out. Calls are shown once they are complete, so a client never gets one that was cut
off. With `live`, name and arguments are shown as they come; a call that breaks then ends where it
broke, and the rest of it is content.
"""

from collections.abc import Callable

from headrace.serving.parsers.call_writer import CallWriter, openai_id
from headrace.serving.parsers.events import (
    CallStarted,
    ContentText,
    Event,
    ReasoningText,
    joined,
)
from headrace.serving.parsers.reasoning import ReasoningParser
from headrace.serving.parsers.scanner import SPACE, Markers, Scanner, Steps, Unreadable
from headrace.serving.parsers.tool_parser import ToolParser, Tools


class Interpreter:
    """Belongs to one answer.

    Args:
        tool_parser, reasoning_parser: `None` reads none.
        tools: those of the request.
        prompt: the text that the answer goes on from.
        live: show calls as they come.
        most_calls: calls beyond so many are left out.
    """

    def __init__(
        self,
        *,
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
        tools: Tools | None = None,
        prompt: str = "",
        live: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._events: list[Event] = []
        self._scanner = Scanner()
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._tools = tools or {}
        self._calls = CallWriter(
            self._scanner,
            self._emit,
            make_id=openai_id if tool_parser is None else tool_parser.make_id,
            live=live,
            most=most_calls,
        )
        self._trims = tool_parser is not None and tool_parser.trims
        self._gap = ""  # white space that shows only if text of its kind follows
        self._skips_space = False  # the next text loses the white space before it
        self._has_content = False
        self._after_call = False
        self._steps = self._answer(prompt)
        self._is_finished = False

    def feed(self, text: str) -> list[Event]:
        """What more text adds; may be nothing while a marker or a call is incomplete."""
        assert not self._is_finished, "text after the end"
        self._scanner.push(text)
        next(self._steps)
        return self._taken()

    def finish(self) -> list[Event]:
        """The answer ended: all that was held back."""
        assert not self._is_finished, "a second end"
        self._is_finished = True
        self._scanner.close()
        for _ in self._steps:
            raise AssertionError("a closed text waits for nothing")
        return self._taken()

    def finish_reason(self, reason: str) -> str:
        """How the answer ended, after `finish`: `tool_calls` in place of `stop` if it made any."""
        return "tool_calls" if reason == "stop" and self._calls.count else reason

    def _answer(self, prompt: str) -> Steps[None]:
        awaited = yield from self._opening(prompt)
        if awaited:
            yield from self._reasoning(awaited)
        begins = self._pairs if self._reasoning_parser and self._reasoning_parser.anywhere else {}
        parser = self._tool_parser
        if parser is not None and parser.starts:
            ahead = yield from self._scanner.space_ahead()
            character = yield from self._scanner.peek(ahead)
            if character and character in parser.starts:
                yield from self._read_calls(self._content)
        markers = Markers((*begins, *(parser.markers if parser is not None else ())))
        while word := (yield from self._scanner.until(markers, self._content)):
            if word in begins:
                self._scanner.take(len(word))
                self._gap = ""
                yield from self._reasoning(begins[word])
            else:
                yield from self._read_calls(self._content)
        if self._gap and not self._after_call:
            self._emit(ContentText(self._gap))

    @property
    def _pairs(self) -> dict[str, str]:
        """Begin markers of reasoning and their end markers."""
        return dict(self._reasoning_parser.pairs) if self._reasoning_parser is not None else {}

    def _opening(self, prompt: str) -> Steps[str]:
        """The end marker of the reasoning that the answer begins with; empty: it does not.

        A begin marker is read also if the prompt has it already: some models write it again.
        """
        if self._reasoning_parser is None:
            return ""
        awaited = self._reasoning_parser.end_awaited(prompt)
        ahead = yield from self._scanner.space_ahead()
        word = yield from self._scanner.literal_ahead(tuple(self._pairs), ahead)
        if not word:
            return awaited
        self._scanner.take(ahead + len(word))
        return self._pairs[word]

    def _reasoning(self, end: str) -> Steps[None]:
        """Read to the end marker, or to a call that shows that it was forgotten."""
        parser = self._tool_parser
        markers = Markers((end, *(parser.ends_reasoning if parser is not None else ())))
        self._skips_space = True
        while word := (yield from self._scanner.until(markers, self._reason)):
            if word == end:
                self._scanner.take(len(end))
                break
            before = self._calls.shown
            yield from self._read_calls(self._reason)
            if self._calls.shown > before:
                break
        else:
            if self._gap:
                self._emit(ReasoningText(self._gap))
        self._gap = ""
        self._skips_space = True

    def _read_calls(self, give_back: Callable[[str], None]) -> Steps[None]:
        assert self._tool_parser is not None
        scanner = self._scanner
        scanner.record()
        try:
            yield from self._tool_parser.read(scanner, self._calls, self._tools)
            scanner.recorded()
        except Unreadable:
            unseen = self._calls.give_up()
            is_bare = unseen.strip(SPACE) in self._tool_parser.markers
            if is_bare and scanner.closed and scanner.at == len(scanner.text):
                self._gap = self._gap if not self._trims else ""
            else:
                give_back(unseen)

    def _reason(self, text: str) -> None:
        text = self._opened(text)
        if body := self._held_back(text, text.rstrip(SPACE)):
            self._emit(ReasoningText(body))

    def _content(self, text: str) -> None:
        text = self._opened(text)
        if self._trims or self._calls.shown:
            body = text.rstrip(SPACE)
        elif self._has_content or text.strip(SPACE):
            body = text
        else:
            body = ""
        if self._held_back(text, body):
            self._has_content = True
            self._after_call = False
            self._emit(ContentText(body))

    def _opened(self, text: str) -> str:
        """The text with the white space that waited before it, if that counts."""
        text = self._gap + text
        return text.lstrip(SPACE) if self._skips_space else text

    def _held_back(self, text: str, body: str) -> str:
        """Keep what comes after the body until more text of the kind follows."""
        self._gap = text[len(body) :]
        if body:
            self._skips_space = False
        return body

    def _emit(self, event: Event) -> None:
        if isinstance(event, CallStarted):
            self._gap = ""
            self._after_call = True
            self._skips_space = not self._has_content
        self._events.append(event)

    def _taken(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events
