"""Line charts as inline SVG, and the page around them: one HTML file that fetches nothing."""

from __future__ import annotations

import html
import json
import math
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


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers from `low` to `high`, about `wanted` of them; one where both are the same."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


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

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        up = (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - up, 1)

    parts = []
    for value in ticks(low, high):
        _, y = place(left, value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.6g}</text>')
    for value in ticks(left, right):
        x, _ = place(value, low)
        words = f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"
        parts.append(f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{words}</text>')
    data = []
    for line, steps, values in drawn:
        points = [place(x, y) for x, y in zip(steps, values, strict=True)]
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        color = f"var(--line{line.color % 8})"
        parts.append(f'<path class="line" style="stroke:{color}" d="{path}"/>')
        if len(points) < 40:
            parts += [f'<circle cx="{x}" cy="{y}" r="2" style="fill:{color}"/>' for x, y in points]
        numbers = {n: [float(f"{v:.6g}") for v in a] for n, a in (("x", steps), ("y", values))}
        data.append({"name": line.name, "px": [x for x, _ in points], **numbers})
    label = html.escape(f"{title} over {x_label}")
    content = html.escape(json.dumps(data, separators=(",", ":")))
    below = f'<br><small class="quiet">{html.escape(meaning)}</small>' if meaning else ""
    return (
        f"<figure><figcaption>{html.escape(title)}{below}</figcaption>"
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-label="{label}" '
        f'data-lines="{content}">{"".join(parts)}</svg></figure>'
    )
