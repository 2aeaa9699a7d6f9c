"""The examples of docs/debugging.md run."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny_engine import write_checkpoint

from headrace import LLM
from headrace.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    canary, dumps, profile = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    folder = write_checkpoint(tmp_path / "llama", "llama")
    monkeypatch.chdir(tmp_path)

    def tiny(model: str, **options: Any) -> LLM:
        assert model == "smollm2"
        settings = {"load_format": "dummy", "device": "cpu", "dtype": "float32"}
        return LLM(str(folder), **settings, **options)

    with mock.patch("headrace.llm.LLM", tiny):
        for example in (canary, dumps, profile):
            exec(compile(example, str(PAGE), "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "{'compared': 8, 'diverged': 0, 'left_out': 0}"
    assert Path(shown[-1]).exists()
    assert main(["diff", "dump-a", "dump-b"]) == 0
    told = capsys.readouterr().out
    assert "tokens paired by name; paths eager and eager" in told
    assert "the dumps agree within the rounding of float32" in told
