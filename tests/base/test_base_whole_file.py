"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from headrace.base.whole_file import remove_left_behind, whole_file


def test_a_file_appears_with_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    with whole_file(path) as place:
        place.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"


def test_nothing_is_left_of_what_was_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")

    def write_half() -> None:
        with whole_file(path) as place:
            place.write_text("half")
            raise ValueError("of whoever writes")

    with pytest.raises(ValueError, match="of whoever writes"):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_process_ends_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second server beside one that joined its model refused to start."""
    listed = [tmp_path / ".a.elsewhere.1.ab.part"]  # listed, and then it has its name
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(listed))
    remove_left_behind(tmp_path / "a")
