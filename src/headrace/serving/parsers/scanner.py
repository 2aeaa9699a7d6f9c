"""Text that is still coming, read from its front by generators.

A reader is a generator (`Steps`): it takes what it needs with `yield from` and the bare `yield`
inside `more` hands control back until more text is there. What a reader decides depends on the
text from where it stands, never on how the text was cut, because every look-up waits until more
text cannot change its answer.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]

SPACE = " \t\r\n"


class Unreadable(Exception):
    """What stands here is not what the reader reads. Raised before the offending text is taken."""


class Markers:
    """Strings to look for in running text."""

    __slots__ = ("_starts", "longest", "words")

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = tuple(sorted(words, key=len, reverse=True))
        self.longest = max(map(len, words), default=0)
        self._starts = frozenset(word[:size] for word in words for size in range(1, len(word)))

    def find(self, text: str, begin: int) -> tuple[int, str]:
        """Place of the first marker (the longest of those that begin there), or -1."""
        places = [(place, word) for word in self.words if (place := text.find(word, begin)) >= 0]
        return min(places, key=lambda each: each[0], default=(-1, ""))

    def held(self, text: str, begin: int) -> int:
        """How many characters of the end may be the beginning of a marker."""
        for size in range(min(self.longest - 1, len(text) - begin), 0, -1):
            if text[len(text) - size :] in self._starts:
                return size
        return 0


class Scanner:
    """The text not read yet, and a record of what was read since `record`."""

    __slots__ = ("_recorded", "at", "closed", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def close(self) -> None:
        """No more text comes."""
        self.closed = True

    def record(self) -> None:
        """Keep what is read from here on; what was kept so far is forgotten."""
        self._recorded = []

    def recorded(self) -> str:
        """What was read since `record`; recording ends."""
        pieces, self._recorded = self._recorded, None
        return "".join(pieces or ())

    def take(self, size: int) -> str:
        """Read so many characters; they must be there."""
        taken = self.text[self.at : self.at + size]
        assert len(taken) == size, "taken without looking"
        self.at += size
        if self._recorded is not None:
            self._recorded.append(taken)
        return taken

    def more(self) -> Steps[bool]:
        """Wait for more text; false when there is none."""
        if self.closed:
            return False
        yield
        return True

    def peek(self, ahead: int = 0) -> Steps[str]:
        """The character so far ahead; empty when the text ends before it."""
        while self.at + ahead >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at + ahead]

    def space_ahead(self, ahead: int = 0) -> Steps[int]:
        """The offset of the next character that is no white space, or of the end."""
        while (character := (yield from self.peek(ahead))) and character in SPACE:
            ahead += 1
        return ahead

    def skip_space(self) -> Steps[str]:
        """Read white space."""
        return self.take((yield from self.space_ahead()))

    def literal_ahead(self, words: tuple[str, ...], ahead: int = 0) -> Steps[str]:
        """The longest of the words that stands so far ahead, or nothing."""
        found, size = "", 0
        while words and (character := (yield from self.peek(ahead + size))):
            words = tuple(word for word in words if word[size] == character)
            size += 1
            found = next((word for word in words if len(word) == size), found)
            words = tuple(word for word in words if len(word) > size)
        return found

    def accept(self, *words: str) -> Steps[str]:
        """Read the longest of the words that stands here, if any."""
        return self.take(len((yield from self.literal_ahead(words))))

    def expect(self, *words: str) -> Steps[str]:
        """Read one of the words.

        Raises:
            Unreadable: none stands here.
        """
        found = yield from self.accept(*words)
        if not found:
            raise Unreadable
        return found

    def until(self, markers: Markers, out: Callable[[str], None]) -> Steps[str]:
        """Hand on the text up to a marker, as soon as it cannot be part of one.

        Returns:
            the marker, not read yet, or an empty string at the end of the text.
        """
        while True:
            place, word = markers.find(self.text, self.at)
            # A marker that is still incomplete counts if it begins no later: it is the longer one.
            open_from = len(self.text) - (0 if self.closed else markers.held(self.text, self.at))
            if word and place < open_from:
                self._hand_on(place - self.at, out)
                return word
            self._hand_on(open_from - self.at, out)
            if not (yield from self.more()):
                return ""

    def _hand_on(self, size: int, out: Callable[[str], None]) -> None:
        if size > 0:
            out(self.take(size))
