"""Text for people: tables, and lines that fit."""

import pytest

from headrace.base.layout import USUAL, WIDEST, hanging, output_width, table


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", USUAL), ("900", WIDEST)])
def test_the_width_is_that_of_the_terminal_within_bounds(columns, width, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.__stdout__", None)
    assert output_width() == width


def test_lines_hang_below_their_first() -> None:
    assert hanging("a word and three more words", head="name  ", indent=6, width=30) == [
        "name  a word and three more",
        "      words",
    ]
    assert hanging("unbreakable-hyphens " * 2, indent=30, width=10) == [
        "unbreakable-hyphens unbreakable-hyphens",
    ]


def test_numbers_of_a_table_stand_at_the_right() -> None:
    lines = list(table(("name", "ms"), [("a", "1.0"), ("bcdef", "10.0")], numbers=("ms",)))
    assert lines == ["name     ms", "-----  ----", "a       1.0", "bcdef  10.0"]
