"""The judge of other people's suites, and the model that says what it is told."""

import sys
from pathlib import Path
from random import Random

import pytest
from conformance import SUITES
from environment import Environment, Unavailable, pip
from lm_eval_suite import compare
from scripted_checkpoint import Answer, cut, write_scripted
from suite import Case, Outcome, Suite, cases_of_junit, judge

from headrace import LLM, SamplingParams

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.chat.TestIt" name="test_good[a]"/>
<testcase classname="tests.chat.TestIt" name="test_bad"><failure message="no"/></testcase>
<testcase name="GET /health"><skipped message="not now"/></testcase>
<testcase classname="x" name="broken"><error>why</error></testcase>
</testsuite></testsuites>"""


def suite_of(**expected: str) -> Suite:
    return Suite(
        name="s", what="", requirements=(), run=lambda place: [], expected_failures=expected
    )


def cases(passed: int, *failed: str) -> list[Case]:
    good = [Case(name=f"good {at}", outcome=Outcome.PASSED) for at in range(passed)]
    return [*good, *(Case(name=name, outcome=Outcome.FAILED, detail="why") for name in failed)]


def test_nothing_failed() -> None:
    verdict = judge(suite_of(), cases(3), fast=False)
    assert (verdict.passed, verdict.ran, verdict.complaints) == (3, 3, [])


def test_a_failure_that_nobody_expects_is_told() -> None:
    assert judge(suite_of(), cases(99, "a"), fast=False).complaints == ["a: why"]


def test_an_expected_failure_is_none() -> None:
    verdict = judge(suite_of(**{"a*": "reason"}), cases(99, "a[x]"), fast=False)
    assert [(case.name, reason) for case, reason in verdict.expected] == [("a[x]", "reason")]
    assert not verdict.complaints


def test_an_expected_failure_that_passes_has_to_leave_the_list() -> None:
    suite = suite_of(**{"good 0": "reason"})
    assert "nothing failed: good 0" in judge(suite, cases(9), fast=False).complaints[0]
    assert not judge(suite, cases(9), fast=True).complaints


def test_expected_failures_are_few() -> None:
    suite = suite_of(**{"a*": "reason"})
    assert not judge(suite, cases(19, "a"), fast=False).complaints
    assert (
        "2 expected failures of 20" in judge(suite, cases(18, "a", "ab"), fast=False).complaints[0]
    )


def test_a_suite_of_which_nothing_ran_does_not_hold() -> None:
    skipped = [Case(name="a", outcome=Outcome.SKIPPED)]
    assert judge(suite_of(), skipped, fast=False).complaints == ["no case passed"]


def test_reports_are_read(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(JUNIT)
    assert [(case.name, case.outcome, case.detail) for case in cases_of_junit(report)] == [
        ("chat.TestIt.test_good[a]", Outcome.PASSED, ""),
        ("chat.TestIt.test_bad", Outcome.FAILED, "no"),
        ("GET /health", Outcome.SKIPPED, "not now"),
        ("x.broken", Outcome.FAILED, "why"),
    ]


def test_every_suite_fixes_its_versions_and_tells_its_reasons() -> None:
    for suite in SUITES.values():
        assert any("==" in each for each in suite.requirements)
        assert all(len(reason) > 20 for reason in suite.expected_failures.values())
        assert all(len(reason) > 20 for reason in suite.left_out.values())


def test_what_cannot_be_fetched_is_told(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-folder" / "package.whl"
    with pytest.raises(Unavailable, match=r"package\.whl"):
        pip(Environment(folder=Path(sys.prefix)), "download", str(missing))


@pytest.mark.parametrize(
    ("served", "outcome"),
    [(764.516099, Outcome.PASSED), (764.53, Outcome.FAILED), (None, Outcome.FAILED)],
)
def test_a_metric_has_to_be_that_of_the_reference(served, outcome) -> None:
    assert compare("word_perplexity", 764.5161, served).outcome is outcome


def test_pieces_are_unique_and_make_the_text() -> None:
    taken: set[str] = set()
    texts = ["aaaaaaaa", "aaaaaaaab", "abababab 東京", "b"]
    pieces = [cut(text, taken, Random(at)) for at, text in enumerate(texts)]
    every = [piece for each in pieces for piece in each]
    assert len(set(every)) == len(every)
    assert "".join(pieces[1]) == texts[1]
    with pytest.raises(ValueError, match="is a piece of another"):
        cut("b", taken, Random(0))


def test_the_scripted_model_says_what_it_is_told(tmp_path: Path) -> None:
    answers = [
        Answer(when="'weather' in last", text='{"city": "東京", "city": "東京"} 🚀'),
        Answer(when="tools", text="with tools"),
        Answer(when="true", text="Hello! Hello! Hello!"),
    ]
    folder = write_scripted(tmp_path / "scripted", answers)
    with LLM(str(folder), device="cpu") as llm:
        for asked, answer in (("the weather", answers[0]), ("hi", answers[2])):
            messages = [{"role": "user", "content": asked}]
            params = SamplingParams(temperature=1.0, max_tokens=99)
            (output,) = llm.chat([messages], params)
            assert output.outputs[0].text == answer.text
            assert output.outputs[0].finish_reason == "stop"
