"""Stop strings over streamed text: what may be shown, what must wait, where it ends.

The match that is completed first in the text wins; of two completed by the same character the
longer one (it starts earlier). So the answer depends on the text alone, never on how tokens cut it.
The automaton is the one of Aho and Corasick (1975): its state is the longest tail of the text that
begins some stop string, and that tail is exactly what has to be held back.
"""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Watches one sequence for any of `stops`; an empty string is our own bug (checked above).

    With `include_stop` the matched string itself is shown too.
    """

    __slots__ = ("_automaton", "_held", "_include_stop", "_state", "matched")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._automaton = _Automaton(stops) if stops else None
        self._include_stop = include_stop
        self._held = ""
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next text, give back what may be shown. After a match nothing more comes."""
        if self.matched is not None:
            return ""
        automaton = self._automaton
        if automaton is None:
            return text
        state, step, found = self._state, automaton.step, automaton.found
        for position, character in enumerate(text):
            state = step(state, character)
            stop = found[state]
            if stop is not None:
                return self._close(self._held + text[: position + 1], stop)
        self._state = state
        text = self._held + text
        shown = len(text) - automaton.depth[state]
        self._held = text[shown:]
        return text[:shown]

    def stop_here(self, stop: str) -> str:
        """`stop` came as something that is no text; gives what was held back before it."""
        return self._close(self.flush() + stop, stop)

    def flush(self) -> str:
        """The tail held back, when the sequence ended for another reason."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _close(self, text: str, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Automaton:
    """`found[s]`: the longest stop string that ends in state s; `depth[s]`: characters held."""

    __slots__ = ("_fall", "_next", "depth", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fall = [0]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fall[state]
        return following

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fall.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Breadth first: a state falls back to its longest proper tail that is a state too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fall[following] = self.step(self._fall[state], character)
                if self.found[following] is None:
                    self.found[following] = self.found[self._fall[following]]
                queue.append(following)
