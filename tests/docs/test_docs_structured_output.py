"""The example of docs/structured_output.md runs."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
from tiny_engine import write_checkpoint

from headrace import LLM

ROOT = Path(__file__).parents[2]


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "structured_output.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    folder = write_checkpoint(tmp_path / "llama", "llama")

    def tiny(model: str) -> LLM:
        assert model == "smollm2"
        return LLM(str(folder), load_format="dummy", device="cpu", dtype="float32", seed=3)

    with mock.patch("headrace.llm.LLM", tiny):
        exec(compile(example, str(page), "exec"), {})
    city, choice, date, total, _ = capsys.readouterr().out.split("\n", 4)
    assert set(json.loads(city)) == {"name", "people", "capital"}
    assert choice in ("positive", "negative")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert re.fullmatch(r"\d( \+ \d){1,3}", total)
