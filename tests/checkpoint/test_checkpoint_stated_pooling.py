"""How a checkpoint says that its embeddings are pooled."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import CheckpointError
from headrace.checkpoint.stated_pooling import folder_pooling

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."


def write(folder: Path, pooling: Any, *behind: str, package: str = OLD) -> Path:
    kinds = ("Transformer", "Pooling", *behind)
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": package + kind}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "stated"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean and max"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls", "mean"]}, "cls and mean"),
        ({}, None),
    ],
)
def test_flags_and_the_word_of_newer_files(
    tmp_path: Path, pooling: dict[str, Any], stated: str | None
) -> None:
    """vLLM#45995: files of sentence-transformers 5.4 were passed over in silence."""
    assert folder_pooling(write(tmp_path, pooling, "Normalize", package=NEW)) == stated


def test_what_comes_behind_the_pooling_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path, {"pooling_mode": "mean"}, "Dense", "Normalize")
    assert folder_pooling(folder) == "mean and Dense"


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert folder_pooling(tmp_path) is None


@pytest.mark.parametrize("content", ["{}", "[1]", "[", '[{"idx": 0}]'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json is not the JSON"):
        folder_pooling(tmp_path)


@pytest.mark.parametrize("pooling", [{"pooling_mode": 3}, []])
def test_a_broken_pooling_is_named(tmp_path: Path, pooling: Any) -> None:
    with pytest.raises(CheckpointError, match=r"1_Pooling.config.json is not the JSON"):
        folder_pooling(write(tmp_path, pooling))
