"""Shapes of well-known models that come with the benchmarks: a config, no weights, no tokenizer.

Dummy weights and prompts of token ids are all a measurement of speed needs, so that it runs from a
checkout alone, without a network.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent / "models"


def shape_names() -> list[str]:
    return sorted(config.parent.name for config in _FOLDER.glob("*/config.json"))


def shape_path(name: str) -> Path | None:
    """The folder of a shape; `None` where the name is none of ours, or is an existing path."""
    if name not in shape_names() or Path(name).exists():
        return None
    return _FOLDER / name


def shown_name(model: str) -> str:
    """What a table calls a model: a shape by its name, anything else as it was asked for."""
    path = Path(model)
    return path.name if path.parent == _FOLDER else model
