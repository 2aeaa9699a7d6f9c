"""The process that tries grammars: what takes for ever, too much or breaks it hurts nobody else."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_walks import accepts, backend, form

from headrace.base.errors import RequestError, UnavailableError
from headrace.sampling.grammar import trial
from headrace.sampling.grammar.compiler import GrammarCompiler
from headrace.sampling.grammar.trial import GrammarTrial
from headrace.sampling.grammar.xgrammar_backend import XgrammarBackend

RULES = [" | ".join(f"r{j} r{(i + j) % 60}" for j in range(60)) for i in range(60)]
AMBIGUOUS = "root ::= r0\n" + "\n".join(f"r{i} ::= {rule} | [^y]" for i, rule in enumerate(RULES))
"""Some minutes."""
LARGE = "root ::= " + "a? " * 60_000 + '\na ::= "b"'
"""Edges by the square of its length: gigabytes."""


pytestmark = pytest.mark.usefixtures("grammars_tried")


@pytest.fixture(scope="module")
def compiler() -> Iterator[XgrammarBackend]:
    made = backend()
    made._trial = GrammarTrial(made._tokens, seconds=0.5, size_bytes=96 << 20)
    yield made
    made.close()


def process_of(compiler: XgrammarBackend) -> Any:
    assert compiler._trial._running is not None
    process, _ = compiler._trial._running
    return process


def test_what_is_no_grammar_is_told_and_ends_nothing(compiler: XgrammarBackend) -> None:
    assert accepts(compiler.compile(form(regex="[a-c]{2}")), "ab")
    first = process_of(compiler)
    with pytest.raises(RequestError, match=r"regex of structured is not a grammar.*not closed"):
        compiler.compile(form(regex="(a"))
    with pytest.raises(RequestError, match="describes no answer"):
        compiler.compile(form(grammar="root ::= root"))
    assert process_of(compiler) is first
    assert first.poll() is None


def test_what_takes_too_much_is_refused_and_the_next_one_is_not(compiler: XgrammarBackend) -> None:
    for text, why in [
        (AMBIGUOUS, "more than 0.5 s to compile"),
        (LARGE, "more than 96 MiB to com"),
    ]:
        assert accepts(compiler.compile(form(regex="ab")), "ab")
        with pytest.raises(RequestError, match=f"grammar of structured takes {why}"):
            compiler.compile(form(grammar=text))


def test_a_machine_that_starts_no_process_is_not_the_fault_of_the_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "PROGRAM", ("/no/such/program",))
    compiler = GrammarCompiler(backend)
    with pytest.raises(UnavailableError, match="cannot be started"):
        compiler.start(form(regex="ab")).wait()
    compiler.close()


def test_a_process_that_fails_at_its_start_is_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "from headrace.sampling.grammar import trial_program as it; import sys;"
    program += (
        "it.XgrammarVocabulary = lambda *_: open('/no/such/file'); it.main(int(sys.argv[1]), 1, 1)"
    )
    monkeypatch.setattr(trial, "PROGRAM", (sys.executable, "-c", program))
    compiler = backend()
    with pytest.raises(RequestError, match="ended with status 1"):
        compiler.compile(form(regex="ab"))
    compiler.close()


def test_nothing_is_tried_after_the_end(compiler: XgrammarBackend) -> None:
    compiler.close()
    with pytest.raises(RequestError, match="closed"):
        compiler.compile(form(regex="ab"))
    assert compiler._trial._running is None
