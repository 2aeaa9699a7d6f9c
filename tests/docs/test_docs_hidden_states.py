"""The example of docs/hidden_states.md runs."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
from tiny_engine import LLAMA, write_checkpoint

from headrace import LLM

PAGE = Path(__file__).parents[2] / "docs" / "hidden_states.md"


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    folder = write_checkpoint(tmp_path / "llama", "llama")
    deep = LLAMA | {"num_hidden_layers": 12, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(deep))

    def tiny(model: str) -> LLM:
        assert model == "smollm2"
        return LLM(str(folder), load_format="dummy", device="cpu", dtype="float32")

    with mock.patch("headrace.llm.LLM", tiny):
        exec(compile(example, str(PAGE), "exec"), {})
    *tokens, shown = capsys.readouterr().out.splitlines()
    assert 1 <= len(tokens) <= 8
    assert all(re.fullmatch(r"\d+ torch\.Size\(\[1, 64\]\)", line) for line in tokens)
    prompt = len("The capital of France is")
    layers, rows = re.fullmatch(r"(\(.*?\)) \((\d+), 3, 64\)", shown).groups()
    assert layers == "(0, 12, 12)"
    assert prompt <= int(rows) <= prompt + 7
