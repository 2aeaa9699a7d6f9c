"""What the text of an answer means, piece by piece."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. Calls count from 0 and come one after the other."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Nothing more comes for this call."""

    index: int


Event = ReasoningText | ContentText | CallStarted | CallArguments | CallEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A whole tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A whole answer."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def collect(events: Iterable[Event]) -> Collected:
    """The answer that a stream of events adds up to."""
    reasoning, content, arguments = [], [], []
    started: list[CallStarted] = []
    for event in events:
        match event:
            case ReasoningText(text):
                reasoning.append(text)
            case ContentText(text):
                content.append(text)
            case CallStarted():
                started.append(event)
                arguments.append("")
            case CallArguments(index, text):
                arguments[index] += text
            case CallEnded():
                pass
    return Collected(
        reasoning="".join(reasoning),
        content="".join(content),
        calls=tuple(
            Call(id=start.id, name=start.name, arguments=text)
            for start, text in zip(started, arguments, strict=True)
        ),
    )


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring texts of a kind in one."""
    together: list[Event] = []
    for event in events:
        last = together[-1] if together else None
        if isinstance(last, ReasoningText) and isinstance(event, ReasoningText):
            together[-1] = ReasoningText(last.text + event.text)
        elif isinstance(last, ContentText) and isinstance(event, ContentText):
            together[-1] = ContentText(last.text + event.text)
        elif isinstance(last, CallArguments) and isinstance(event, CallArguments):
            together[-1] = CallArguments(last.index, last.text + event.text)
        else:
            together.append(event)
    return together
