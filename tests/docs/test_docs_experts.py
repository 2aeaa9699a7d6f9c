"""The examples of docs/experts.md run."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny_engine import write_checkpoint

from headrace import LLM

PAGE = Path(__file__).parents[2] / "docs" / "experts.md"


def test_the_examples_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    folder = write_checkpoint(tmp_path / "moe", "moe")
    monkeypatch.chdir(tmp_path)

    def tiny(model: str, **options: Any) -> LLM:
        assert model == "Qwen/Qwen3-30B-A3B"
        return LLM(str(folder), load_format="dummy", device="cpu", dtype="float32", **options)

    with mock.patch("headrace.llm.LLM", tiny):
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["(10, 2, 2)", "torch.Size([2, 8])"]
