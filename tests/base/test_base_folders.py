"""A folder to write to is made, or refused with the reason."""

import os
from pathlib import Path

import pytest

from headrace.base.errors import RequestError
from headrace.base.folders import made_folder


def test_it_is_made_with_what_lies_above(tmp_path: Path) -> None:
    asked = tmp_path / "a" / "b"
    assert made_folder(asked, "The profile") == asked
    assert made_folder(str(asked), "The profile") == asked
    assert asked.is_dir()


@pytest.mark.parametrize("asked", [None, 3, b"folder", "", "  ", ["folder"]])
def test_what_names_no_folder_is_refused(asked: object) -> None:
    with pytest.raises(RequestError, match=r"The dump cannot be written to .*That names no folder"):
        made_folder(asked, "The dump")


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for asked, why in (
        (str(file), "exists"),
        (str(file / "below"), "Not a directory"),
        ("a\0b", "null byte"),
        ("a" * 5000, r"File name too long\."),
        ("~nobody-of-that-name/x", "home directory"),
    ):
        with pytest.raises(RequestError, match=f"(?s)cannot be written to .*{why}.*Name another"):
            made_folder(asked, "The dump")


def test_a_folder_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write anywhere
    with pytest.raises(RequestError, match="This process may not write there"):
        made_folder(tmp_path, "The dump")
