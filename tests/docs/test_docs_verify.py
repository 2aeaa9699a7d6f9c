"""docs/verify.md: its flags exist, its bounds are those of the code, its example runs."""

import re
from pathlib import Path
from unittest import mock

import pytest
from tiny_engine import write_checkpoint

from headrace import LLM
from headrace.cli.main import main
from headrace.testing.comparison import HALF

PAGE = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()


def test_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert {"--prompts", "--deep", "--html", "--json", "--assume"} <= named <= known


def test_loose_bounds_are_those_of_the_code() -> None:
    bfloat16, float16 = HALF["bfloat16"], HALF["float16"]
    told = " ".join(PAGE.split())
    for bound, name in ((bfloat16, "bfloat16"), (float16, "float16")):
        assert (
            f"{bound.logprob:g}, {bound.divergence:g} nats and {bound.excused * 100:g} % in {name}"
        ) in told


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    folder = write_checkpoint(tmp_path / "llama", "llama")

    def tiny(model: str) -> LLM:
        assert model == "smollm2"
        return LLM(str(folder), load_format="dummy", device="cpu")

    with mock.patch("headrace.llm.LLM", tiny):
        exec(compile(example, "verify.md", "exec"), {})
    assert "decode steps of" in capsys.readouterr().out
