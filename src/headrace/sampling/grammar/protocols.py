"""Grammars as the engine sees them, whatever library makes them."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from headrace.request.structured_output import StructuredOutput


class GrammarMatcher(Protocol):
    """Where one answer stands in a grammar."""

    @property
    def is_complete(self) -> bool:
        """The answer may end here."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, and nothing has changed, where it cannot follow."""

    def allowed(self, line: Tensor) -> None:
        """Write which tokens may follow into `line` [W] int32: text, no ending."""


class CompiledGrammar(Protocol):
    """A grammar ready for use, shared by all answers that must have its form."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def matcher(self) -> Callable[[], GrammarMatcher]: ...


class GrammarBackend(Protocol):
    """What compiles grammars for one vocabulary; called from several threads at once."""

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Ends in bounded time. Raises `RequestError` with what is wrong with the grammar,
        `UnavailableError` when none can be compiled now."""

    def close(self) -> None:
        """Let go of what compiles."""


class PendingGrammar(Protocol):
    """A grammar on its way."""

    def poll(self, wait: float = 0.0) -> CompiledGrammar | None:
        """The grammar when it is there within `wait` seconds; raises `RequestError` when it never
        will be, `UnavailableError` when it cannot be made now."""
