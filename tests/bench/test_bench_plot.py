"""The picture of time against floor, from JSON lines."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, UnsupportedError
from headrace.bench.plot import draw, read_decodes


def decode(model: str, batch: int, kind: str = "decode") -> dict[str, Any]:
    return {
        "kind": kind,
        "model": model,
        "dtype": "bfloat16",
        "hardware": "GPU",
        "batch": batch,
        "context": 1056,
        "step_seconds": 0.004 * batch,
        "steady_seconds": 0.0042 * batch,
        "floor_seconds": 0.003 * batch,
        "ratio": 1.33,
    }


def write(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_decodes_of_several_files_by_model_and_batch(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", decode("m", 32), decode("m", 1), decode("m", 4, "prefill"))
    second = write(tmp_path / "b.jsonl", decode("path/to/other", 8))
    models = read_decodes([first, second])
    assert [each["batch"] for each in models["m, bfloat16, GPU"]] == [1, 32]
    assert list(models) == ["m, bfloat16, GPU", "other, bfloat16, GPU"]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    models = read_decodes([write(tmp_path / "a.jsonl", decode("m", 1), decode("n", 2))])
    draw(models, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(models, tmp_path / "missing" / "out.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(models, tmp_path / "out.unknown")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    models = read_decodes([write(tmp_path / "a.jsonl", decode("m", 1))])
    with pytest.raises(UnsupportedError, match=r"pip install 'headrace\[bench\]'"):
        draw(models, tmp_path / "out.png")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no decode step"),
        ('{"kind": "prefill"}\n', "no decode step"),
        ("batch 1\n", "cannot be read as JSON lines"),
        (None, "cannot be read as JSON lines"),
    ],
)
def test_files_without_decodes(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "a.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_decodes([file])
