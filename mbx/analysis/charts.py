"""Line charts as inline SVG, and the page around them: one HTML file that fetches nothing."""

from __future__ import annotations

import html
import json
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mbx.analysis import drawing

_WIDTH, _HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 12, 26
_POINTS = 300  # a line has no more: that many fit on a screen


class Line(NamedTuple):
    """A named line through points; color: its number in `mbx.analysis.drawing.PALETTE`."""

    name: str
    color: int
    x: Sequence[float]
    y: Sequence[float]


def fill(template: str, **values: str) -> str:
    """The text of a template file of this folder, with HTML in the place of its {{names}}."""
    text = pathlib.Path(__file__).with_name(template).read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)


def page(title: str, body: str) -> str:
    """A whole page; title: text, body: HTML."""
    return fill("page.html", title=html.escape(title), colors=drawing.css(":root"), body=body)


def _ticks(low: float, high: float) -> np.ndarray:
    """About four round numbers from `low` to `high`."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)
    return found[(found >= low) & (found <= high)]


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """At most 300 of the finite points, including the first, the last and the extremes."""
    steps, values = np.asarray(x, float), np.asarray(y, float)
    finite = np.isfinite(steps) & np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if steps.size <= _POINTS:
        return steps, values
    keep = {0, steps.size - 1}
    for part in np.array_split(np.arange(steps.size), _POINTS // 2 - 1):
        keep |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    chosen = sorted(keep)
    return steps[chosen], values[chosen]


def chart(
    title: str, lines: Sequence[Line], *, x_label: str = "environment steps", meaning: str = ""
) -> str:
    """A figure with a caption below it; '' where no line has a finite point.
    meaning: explanation of the title, in small letters. Lines without a finite point are left out.
    """
    drawn = [(line, *thin(line.x, line.y)) for line in lines]
    drawn = [one for one in drawn if one[1].size]
    if not drawn:
        return ""
    left, right = min(x.min() for _, x, _ in drawn), max(x.max() for _, x, _ in drawn)
    low, high = min(y.min() for _, _, y in drawn), max(y.max() for _, _, y in drawn)
    if low == high:
        low, high = low - abs(low) * 0.1 - 0.5, high + abs(high) * 0.1 + 0.5
    margin = 0.04 * (high - low)
    low, high, right = low - margin, high + margin, right if right > left else left + 1

    def across(x: np.ndarray) -> list[float]:
        share = (x - left) / (right - left)
        return np.round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1).tolist()

    def down(y: np.ndarray) -> list[float]:
        share = (y - low) / (high - low)
        return np.round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1).tolist()

    parts = []
    for value, y in zip(found := _ticks(low, high), down(found), strict=True):
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.6g}</text>')
    for value, x in zip(found := _ticks(left, right), across(found), strict=True):
        words = f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"
        parts.append(f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{words}</text>')
    data = []
    for line, steps, values in drawn:
        points = list(zip(across(steps), down(values), strict=True))
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        color = f"var(--line{line.color % 8})"
        parts.append(f'<path class="line" style="stroke:{color}" d="{path}"/>')
        if len(points) < 40:
            parts += [f'<circle cx="{x}" cy="{y}" r="2" style="fill:{color}"/>' for x, y in points]
        numbers = {n: [float(f"{v:.6g}") for v in a] for n, a in (("x", steps), ("y", values))}
        data.append({"name": line.name, "px": across(steps), **numbers})
    content = html.escape(json.dumps(data, separators=(",", ":")))
    below = f'<br><small class="quiet">{html.escape(meaning)}</small>' if meaning else ""
    title, x_label = html.escape(title), html.escape(x_label)
    return (
        f"<figure><figcaption>{title}{below}</figcaption>"
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'aria-label="{title} over {x_label}" data-lines="{content}">'
        f"{''.join(parts)}</svg></figure>"
    )
