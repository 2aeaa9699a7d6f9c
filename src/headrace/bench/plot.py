"""Time against floor, drawn from the JSON lines of `headrace bench step`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError, UnsupportedError

Lines = list[Mapping[str, Any]]


def read_decodes(files: Iterable[Path]) -> dict[str, Lines]:
    """The decode lines of each model, by batch size.

    Raises:
        ConfigError: a file cannot be read, holds something else than JSON lines, or none of them
            holds a decode line.
    """
    models: dict[str, Lines] = {}
    for file in files:
        for entry in _entries(file):
            if entry.get("kind") == "decode":
                models.setdefault(_name(entry), []).append(entry)
    if not models:
        raise ConfigError(
            "There is no decode step to draw",
            remedy="Give files that `headrace bench step MODEL --json` wrote",
        )
    return {name: sorted(found, key=lambda each: each["batch"]) for name, found in models.items()}


def _entries(file: Path) -> Lines:
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON lines", why=str(error)) from None
    return [line for line in lines if isinstance(line, dict)]


def _name(entry: Mapping[str, Any]) -> str:
    return f"{Path(entry['model']).name}, {entry['dtype']}, {entry['hardware']}"


def draw(models: Mapping[str, Lines], target: Path) -> None:
    """One panel per model: ms/step, steady ms and the floor over the batch size.

    Raises:
        UnsupportedError: there is no matplotlib. ConfigError: the file cannot be written.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(models), 4.5), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, (name, entries) in zip(panels, models.items(), strict=True):
        _panel(panel, name, entries)
    save(figure, target)


def check_matplotlib() -> None:
    """Raise `UnsupportedError` where there is none; ask before the work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "There is no matplotlib to draw with",
            why=str(error),
            remedy="pip install 'headrace[bench]'",
        ) from None


def save(figure: Any, target: Path) -> None:
    """Write a figure of matplotlib.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{target} cannot be written", why=str(error)) from None


def _panel(panel: Any, name: str, entries: Lines) -> None:
    batches = [entry["batch"] for entry in entries]
    for key, label, style in (
        ("step_seconds", "ms/step", "o-"),
        ("steady_seconds", "steady", "s--"),
        ("floor_seconds", "floor", "k:"),
    ):
        panel.plot(batches, [entry[key] * 1e3 for entry in entries], style, label=label)
    for entry in entries:
        panel.annotate(
            f"{entry['ratio']:.2f}",
            (entry["batch"], entry["step_seconds"] * 1e3),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.minorticks_off()
    panel.margins(0.1, 0.12)
    panel.set_title(name)
    panel.set_xlabel(f"sequences, context about {entries[0]['context']:.0f}")
    panel.set_ylabel("milliseconds")
    panel.legend()
