"""`headrace verify`: exit status, table, JSON, prompts from a file."""

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.verify import read_prompts
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
    file.write_text("a text\n\n[1, 2]\n[not ids]\n[]\n")
    assert [each.prompt for each in read_prompts(str(file))] == [
        "a text",
        [1, 2],
        "[not ids]",
        "[]",
    ]


@pytest.mark.parametrize("content", [None, "\n\n"])
def test_a_file_without_prompts_is_an_error(
    config_only: str, tmp_path: Path, capsys, content: str | None
) -> None:
    file = tmp_path / "lines"
    if content is not None:
        file.write_text(content)
    assert main(["verify", config_only, *FLAGS, "--prompts", str(file)]) == 2
    assert "prompt file" in capsys.readouterr().err
