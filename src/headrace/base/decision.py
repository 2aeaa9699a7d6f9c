"""A choice of the engine with its reason, and what was refused on the way."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One candidate that was not taken: why, and what would make it admissible."""

    subject: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{self.subject}: {self.reason}{remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet(Refusal):
    """A refusal that ends by itself: what is missing is made when a step comes that wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[T]):
    """One settled choice.

    `asked` is true when the operator named the value, false when the engine chose it.
    """

    name: str
    value: T
    reason: str
    asked: bool = False
    refused: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        origin = "asked" if self.asked else "auto"
        return f"{self.name} = {self.value} [{origin}] {self.reason}"
