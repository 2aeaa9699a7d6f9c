"""`headrace verify`: exit status, table, JSON, prompts from a file."""

import json
import os
import re
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.cli.main import main
from headrace.cli.verify import check_writable, read_prompts
from headrace.execution.preparation import BatchPreparation

FLAGS = (
    *("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--cpu-graph", "off"),
    *("--attention-backend", "torch_native", "--page-size", "16", "--chunked-prefill-size", "16"),
    "--no-enable-prefix-cache",
)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts"
    file.write_text("[5, 9, 33, 2, 8, 61, 7, 30, 1, 1, 4, 50, 51, 52, 53, 9, 3]\n\n[5, 9]\n[4]\n")
    return str(file)


def test_agreement_is_0_and_a_fault_is_1(
    config_only: str, prompts: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["verify", config_only, *FLAGS, "--prompts", prompts]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "configurations agree with the reference" in shown.out
    assert "Not admitted" in shown.out
    assert shown.err.count(": ok") == 4
    assert re.match(r"first the reference: \d+ prompts in float32, one by one\n", shown.err)
    assert "; 4 configurations follow, fewer where options are fixed" in shown.err
    assert re.search(r"^1/4 .*: ok, about \d+ s left$", shown.err, flags=re.MULTILINE)
    original = BatchPreparation.fill

    def fill(self, batch) -> None:
        original(self, batch)
        if batch.mode.is_decode and self._page_size == 16:
            batch.positions = batch.positions + 1

    monkeypatch.setattr(BatchPreparation, "fill", fill)
    assert main([*command, "--json", "-", "--assume", "nothing"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["passed"]
    assert len(data["results"]) == data["possible"] == 4
    assert all(result["problems"] for result in data["results"])
    assert data["results"][0]["configuration"]["path"] == "eager"


def test_prompts_are_texts_or_ids(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    deep = "[" * 100_000  # deeper than JSON is read
    file.write_text(f"a text\n\n[1, 2]\n[not ids]\n[]\n{deep}\n")
    assert [each.prompt for each in read_prompts(str(file))] == [
        "a text",
        [1, 2],
        "[not ids]",
        "[]",
        deep,
    ]


def test_json_lines_bring_prompts_conversations_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    talk = [{"role": "user", "content": "Hi"}]
    lines = (
        {"prompt": "a text", "max_tokens": 3},
        {"prompt": [1, 2]},
        {"messages": talk, "max_tokens": 4},
    )
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = read_prompts(str(file))
    assert (first.prompt, first.max_tokens) == ("a text", 3)
    assert (second.prompt, second.max_tokens) == ([1, 2], None)
    assert (third.messages, third.max_tokens) == (talk, 4)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "a"', "is no JSON"),
        ('{"prompt": ' + "[" * 100_000, "is no JSON"),
        ('{"prompt": "a", "temperature": 1}', "has temperature"),
        ('{"max_tokens": 3}', "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": [1, "b"]}', "neither text nor ids"),
        ('{"messages": "hi"}', "a list of objects"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    config_only: str, tmp_path: Path, capsys, line: str, told: str
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(line)
    assert main(["verify", config_only, *FLAGS, "--prompts", str(file)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert str(file) in error


def test_reports_go_to_files_beside_the_table(
    config_only: str, prompts: str, tmp_path: Path, capsys
) -> None:
    data, page = tmp_path / "report.json", tmp_path / "report.html"
    command = ["verify", config_only, *FLAGS, "--prompts", prompts, "--deep"]
    assert main([*command, "--json", str(data), "--html", str(page)]) == 0
    assert "mean KL" in capsys.readouterr().out
    assert json.loads(data.read_text())["passed"]
    assert page.read_text().startswith("<!doctype html>")
    assert main([*command, "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "Its folder is not there" in capsys.readouterr().err
    for file in (str(tmp_path), ""):
        assert main([*command, "--json", file]) == 2
        assert "It is a folder. Name another file" in capsys.readouterr().err
    for file, place in (("-", "standard output"), (str(data), repr(str(data))[:40])):
        assert main([*command, "--json", file, "--html", file]) == 2
        assert f"both go to {place}" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_take_the_table_along(
    config_only: str, prompts: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError("No space left on device")

    page = tmp_path / "page.html"
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["verify", config_only, *FLAGS, "--prompts", prompts, "--html", str(page)]) == 2
    shown = capsys.readouterr()
    assert "configurations agree with the reference" in shown.out
    assert "cannot be written. No space left on device" in shown.err  # behind its name, cut short


def test_a_file_that_may_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write anywhere
    with pytest.raises(ConfigError, match="This process may not write there"):
        check_writable(str(tmp_path / "page.html"))


@pytest.mark.parametrize("content", [None, "\n\n"])
def test_a_file_without_prompts_is_an_error(
    config_only: str, tmp_path: Path, capsys, content: str | None
) -> None:
    file = tmp_path / "lines"
    if content is not None:
        file.write_text(content)
    assert main(["verify", config_only, *FLAGS, "--prompts", str(file)]) == 2
    assert "prompt file" in capsys.readouterr().err
