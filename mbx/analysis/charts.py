"""Line charts as inline SVG for pages that are one file: no library draws them, none shows them."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_WIDTH, _HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 12, 26
_POINTS = 300  # a line has no more: that many fit on a screen


class Line(NamedTuple):
    """A named line through points; color: its number in `mbx.analysis.drawing.PALETTE`."""

    name: str
    color: int
    x: Sequence[float]
    y: Sequence[float]


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
    """At most 300 of the finite points, the first, the last and every extreme among them."""
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
    """A figure with a caption; lines without a finite point are left out, '' where none is left.

    Args:
        title: of the figure.
        lines: what is drawn.
        x_label: what they are drawn over.
        meaning: of the title, in small letters below it.
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
    data: list[dict[str, Any]] = []
    for line, steps, values in drawn:
        points = [place(x, y) for x, y in zip(steps, values, strict=True)]
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        color = f"var(--line{line.color % 8})"
        parts.append(f'<path class="line" style="stroke:{color}" d="{path}"/>')
        if len(points) < 40:
            parts += [f'<circle cx="{x}" cy="{y}" r="2" style="fill:{color}"/>' for x, y in points]
        data.append(
            {
                "name": line.name,
                "px": [x for x, _ in points],
                "x": [float(f"{x:.6g}") for x in steps],
                "y": [float(f"{y:.6g}") for y in values],
            }
        )
    label = html.escape(f"{title} over {x_label}", quote=True)
    content = html.escape(json.dumps(data, separators=(",", ":")), quote=True)
    below = f'<br><small class="quiet">{html.escape(meaning)}</small>' if meaning else ""
    return (
        f"<figure><figcaption>{html.escape(title)}{below}</figcaption>"
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'aria-label="{label}" data-lines="{content}">'
        f"{''.join(parts)}</svg></figure>"
    )


STYLE = """
.chart{width:100%;height:auto;display:block}
.chart text{font-size:11px;fill:var(--quiet)}
.chart .grid{stroke:var(--grid);fill:none}
.chart .line{fill:none;stroke-width:1.6;stroke-linejoin:round}
figure{margin:0;background:var(--page);border:1px solid var(--grid);border-radius:6px;padding:8px}
figcaption{font-size:13px;padding:0 4px 4px;overflow-wrap:anywhere}
#tip{position:fixed;display:none;pointer-events:none;background:var(--ink);color:var(--page);
padding:4px 8px;border-radius:4px;font-size:12px;white-space:pre}
"""

# Under the pointer: the values of each line at the step that is nearest.
SCRIPT = """
const tip = document.createElement('div');
tip.id = 'tip';
document.body.append(tip);
for (const svg of document.querySelectorAll('svg.chart')) {
  const lines = JSON.parse(svg.dataset.lines);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    tip.textContent = lines.map(line => {
      let best = 0;
      line.px.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(line.px[best] - at)) best = i; });
      return `${line.name}: ${line.y[best]} at ${line.x[best].toLocaleString('en')}`;
    }).join('\\n');
    tip.style.display = 'block';
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, room)) + 'px';
    tip.style.top = event.clientY + 14 + 'px';
  });
  svg.addEventListener('pointerleave', () => { tip.style.display = 'none'; });
}
"""
