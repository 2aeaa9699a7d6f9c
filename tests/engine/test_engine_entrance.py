"""A request waits at the entrance for its grammar: queued, refused or left, once."""

from collections.abc import Iterator
from typing import Any

import pytest
from children import request

from headrace.base.errors import RequestError
from headrace.engine.process.entrance import Entrance
from headrace.request.messages import Refused, Submit


class Grammar:
    """Being compiled, until it `is_ready` or has an `error`."""

    def __init__(self) -> None:
        self.is_ready = False
        self.error: Exception | None = None

    def poll(self) -> object | None:
        if self.error is not None:
            raise self.error
        return self if self.is_ready else None


class Prepared:
    def __init__(self, grammar: Grammar | None) -> None:
        self.grammar = grammar


class FakeEngine:
    """Prepares requests with the grammars it was given, one after the other."""

    def __init__(self, grammars: list[Grammar | None]) -> None:
        self._grammars: Iterator[Grammar | None] = iter(grammars)
        self.queued: list[str] = []

    def prepare(self, *_: Any, **__: Any) -> Prepared:
        return Prepared(next(self._grammars))

    def submit(self, _prepared: Prepared, *, request_id: str, **_: Any) -> str:
        self.queued.append(request_id)
        return request_id


def entrance(*grammars: Grammar | None) -> tuple[Entrance, FakeEngine, list[Refused]]:
    engine, refused = FakeEngine(list(grammars)), []
    door = Entrance(engine, refuse=refused.append)  # type: ignore[arg-type]
    for number in range(len(grammars)):
        door.take(named(number))
    return door, engine, refused


def named(number: int) -> Submit:
    return request(request_id=str(number))


def test_others_pass_while_one_waits_for_its_grammar() -> None:
    grammar = Grammar()
    door, engine, refused = entrance(grammar, None)
    assert door.admit() == ["1"]
    assert not door.is_empty
    grammar.is_ready = True
    assert door.admit() == ["0"]
    assert door.is_empty
    assert (engine.queued, refused) == (["1", "0"], [])


@pytest.mark.parametrize(
    ("error", "kind"), [(RequestError("bad"), "RequestError"), (KeyError("x"), "HeadraceError")]
)
def test_a_grammar_that_is_none_refuses_its_request_once(error: Exception, kind: str) -> None:
    grammar = Grammar()
    door, engine, refused = entrance(grammar)
    assert door.admit() == []
    grammar.error = error
    assert door.admit() == []
    assert door.admit() == []
    assert door.is_empty
    assert [(each.request_id, each.failure.kind) for each in refused] == [("0", kind)]
    assert engine.queued == []


def test_who_leaves_is_never_queued() -> None:
    grammar = Grammar()
    door, engine, refused = entrance(grammar)
    assert [each.request_id for each in door.leave(["0", "unknown"])] == ["0"]
    grammar.is_ready = True
    assert door.admit() == []
    assert (engine.queued, refused) == ([], [])
