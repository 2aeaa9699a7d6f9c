"""Plots of a report of `verify` as SVG: text, with no library and nothing to load."""

import math
from collections.abc import Sequence
from html import escape

INK, MUTED, GRID = "var(--ink)", "var(--muted)", "var(--grid)"
GOOD, BAD, SECOND = "var(--good)", "var(--bad)", "var(--second)"
LOWEST = 1e-9
WIDTH = 1040
LEGEND = (  # shares of the bound
    (1e-4, "1/10,000 of the bound, or less"),
    (1e-2, "1/100"),
    (1e-1, "1/10"),
    (1.0, "the bound"),
    (math.inf, "beyond"),
)


class LogScale:
    """Values to places on a logarithmic axis; what is below it lies at its start, and what is no
    number at its end."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        positive = [value for value in values if math.isfinite(value) and value > LOWEST]
        self.low = math.floor(math.log10(min(positive, default=LOWEST)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(positive, default=1.0)) + 1e-9))
        self._start, self._stop = start, stop

    def __call__(self, value: float) -> float:
        if not math.isfinite(value):
            return self._stop
        share = (math.log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return self._start + min(share, 1.0) * (self._stop - self._start)

    def ticks(self) -> list[tuple[float, str]]:
        step = max(1, math.ceil((self.high - self.low) / 8))
        powers = range(self.low, self.high + 1, step)
        return [(self(10.0**power), power_text(power)) for power in powers]


def power_text(power: int) -> str:
    """0.01 and its neighbours as people write them, what is smaller as 1e-5."""
    return f"{10.0**power:g}"


def dots(rows: Sequence[tuple[str, float, bool]], bound: float, *, label: str) -> str:
    """One row per configuration: its value as a dot, against a bound.

    Args:
        rows: name, value, whether it passed. label: what the axis measures.
    """
    width, left, top, height = WIDTH, 560, 22, 20
    axis = LogScale([*(value for _, value, _ in rows), bound], left, width - 70)
    bottom = top + height * len(rows)
    parts = [_vertical(place, top, bottom, text) for place, text in axis.ticks()]
    limit = axis(bound)
    parts.append(_line(limit, top - 6, limit, bottom, BAD, dash="4 3"))
    parts.append(_text(limit, top - 9, f"bound {bound:.2g}", anchor="middle", color=BAD))
    for index, (name, value, passed) in enumerate(rows):
        y = top + height * (index + 0.5)
        color = GOOD if passed else BAD
        parts.append(_text(left - 10, y + 4, name, anchor="end", color=INK))
        parts.append(_line(left, y, axis(value), y, color, opacity=0.35))
        parts.append(_dot(axis(value), y, 4.5, color))
        parts.append(_text(axis(value) + 9, y + 4, number_text(value), color=MUTED))
    parts.append(_text((left + width - 70) / 2, bottom + 32, label, anchor="middle", color=MUTED))
    return _svg(width, bottom + 40, parts, label)


def heat_map(
    rows: Sequence[tuple[str, Sequence[Sequence[float]]]],
    columns: Sequence[str],
    bound: float,
    *,
    label: str,
) -> str:
    """Errors by place: a row per configuration, its sequences side by side, a cell per token.

    Args:
        rows: name and, for each column, the values of its places. columns: names of the sequences.
    """
    width, left, top, height, gap = WIDTH, 60, 20, 16, 4
    counts = [
        max((len(values[column]) for _, values in rows), default=0)
        for column in range(len(columns))
    ]
    cell = (width - left - gap * len(columns)) / max(1, sum(counts))
    parts: list[str] = []
    x = float(left)
    for column, count in enumerate(counts):
        for index, (name, values) in enumerate(rows):
            y = top + index * (height + 2)
            for place, value in enumerate(values[column]):
                title = f"{name}: {columns[column]}, token {place}: {number_text(value)}"
                parts.append(
                    f'<rect x="{x + place * cell:.1f}" y="{y}" width="{cell:.2f}" '
                    f'height="{height}" fill="{_heat(value, bound)}">'
                    f"<title>{escape(title)}</title></rect>"
                )
        parts.append(_text(x, top - 6, _short(columns[column]), color=MUTED))
        x += count * cell + gap
    for index in range(len(rows)):
        y = top + index * (height + 2) + 12
        parts.append(_text(left - 8, y, str(index + 1), anchor="end", color=INK))
    bottom = top + len(rows) * (height + 2) + 14
    x = float(left)
    for share, name in LEGEND:
        fill = _heat(share * bound, bound)
        parts.append(f'<rect x="{x}" y="{bottom}" width="14" height="12" fill="{fill}"/>')
        parts.append(_text(x + 20, bottom + 11, name))
        x += 40 + 7 * len(name)
    return _svg(width, bottom + 20, parts, label)


def layer_lines(
    keys: Sequence[float],
    values: Sequence[float],
    bounds: Sequence[float],
    *,
    label: str,
) -> str:
    """Errors of keys and values by layer against their bounds."""
    width, left, top, bottom = 700, 60, 14, 190
    axis = LogScale([*keys, *values, *(bound / 10 for bound in bounds)], bottom, top)
    step = (width - left - 90) / max(1, len(keys) - 1)
    parts = []
    for place, text in axis.ticks():
        parts.append(_line(left, place, width - 90, place, GRID))
        parts.append(_text(left - 8, place + 4, text, anchor="end", color=MUTED))
    every = max(1, math.ceil(len(keys) / 16))
    for layer in range(0, len(keys), every):
        parts.append(_text(left + layer * step, bottom + 17, str(layer), anchor="middle"))
    for name, series, color, dash in (
        ("bound", bounds, BAD, "4 3"),
        ("keys", keys, GOOD, ""),
        ("values", values, SECOND, ""),
    ):
        points = [(left + layer * step, axis(value)) for layer, value in enumerate(series)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        if name != "bound":
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points
            ]
    for index, (name, color) in enumerate((("keys", GOOD), ("values", SECOND), ("bound", BAD))):
        parts.append(_text(width - 80, top + 16 * (index + 1), f"● {name}", color=color))
    parts.append(_text((left + width - 90) / 2, bottom + 36, label, anchor="middle", color=MUTED))
    return _svg(width, bottom + 44, parts, label)


def number_text(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "not a number"


def _heat(value: float, bound: float) -> str:
    """Green below a hundredth of the bound, through yellow, to red at it and dark red beyond."""
    if not value <= bound:
        return "#8c0d1c"
    share = 1.0 + math.log10(max(value, LOWEST) / bound) / 4  # 0 at a ten-thousandth of the bound
    return f"hsl({120 - 110 * min(1.0, max(0.0, share)) ** 2:.0f} 55% 62%)"


def _short(name: str) -> str:
    wave, _, index = name.partition(" prompt ")
    return f"{wave[0]}{index}"


def _vertical(x: float, top: float, bottom: float, text: str) -> str:
    return _line(x, top, x, bottom, GRID) + _text(x, bottom + 15, text, anchor="middle")


def _dot(x: float, y: float, radius: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, *, dash: str = "", opacity: float = 1.0
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-dasharray="{dash}" stroke-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", color: str = MUTED) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    inside = "".join(parts)
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="{escape(label)}">{inside}</svg>'
    )
