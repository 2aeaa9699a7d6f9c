import tracemalloc
from pathlib import Path

import pytest

from headrace.base.shown import shown


@pytest.mark.parametrize(
    "value",
    [1, "a'b", b"a", [], [1], (), (1,), (1, "2"), {}, {"a": [1, {2: None}]}, [[["x"]]], {1, 2}],
)
def test_a_short_value_is_shown_as_python_writes_it(value: object) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 200, [1] * 200, {each: each for each in range(200)}])
def test_a_long_one_is_cut_where_python_would_be_cut(value: object) -> None:
    assert shown(value, 60) == repr(value)[:57] + "..."


def test_a_path_is_shown_as_its_text() -> None:
    assert shown(Path("a/b")) == "'a/b'"
    assert shown([Path("x" * 100)], 20) == "['" + "x" * 15 + "..."


def test_white_space_becomes_blanks() -> None:
    class Broken:
        def __repr__(self) -> str:
            return "a\n\n  b"

    assert shown([Broken()]) == "[a b]"


def test_what_cannot_be_printed_is_told_by_its_type() -> None:
    assert "type list" in shown([10**5000])


@pytest.mark.parametrize(
    "value",
    [
        [1] * 1_000_000,
        "a" * 4_000_000,
        dict.fromkeys(range(500_000)),
        [["a" * 4_000_000]],
    ],
    ids=["list", "text", "dict", "nested"],
)
def test_millions_of_entries_cost_what_a_few_do(value: object) -> None:
    tracemalloc.start()
    try:
        assert len(shown(value)) == 80
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000  # bytes; all of it takes millions


def test_what_is_nested_deeply_is_cut_too() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "[" * 77 + "..."
