"""The example of docs/embeddings.md runs."""

import re
from pathlib import Path
from unittest import mock

import pytest
from tiny_engine import write_checkpoint

from headrace import LLM

PAGE = Path(__file__).parents[2] / "docs" / "embeddings.md"


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    folder = write_checkpoint(tmp_path / "llama", "llama")

    def tiny(model: str) -> LLM:
        assert model == "smollm2"
        return LLM(str(folder), load_format="dummy", device="cpu", dtype="float32")

    with mock.patch("headrace.llm.LLM", tiny):
        exec(compile(example, str(PAGE), "exec"), {})
    first, second, shape = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"-?[01]\.\d{3} Cooking eggs", first)
    assert re.fullmatch(r"-?[01]\.\d{3} The stock market fell", second)
    assert shape == "(16,)"
