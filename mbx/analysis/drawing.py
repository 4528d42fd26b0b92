"""Figures as SVG that follow a light or a dark theme, drawn with matplotlib.

    with drawing.style("my-figure"):
        figure, axes = plt.subplots()
        ...
        text = drawing.to_svg(figure, title="what it shows")

Text stays text. The same figure gives the same characters, whenever it is drawn.
"""

from __future__ import annotations

import contextlib
import html
import io
import pathlib
import re
from collections.abc import Iterator
from typing import Any

# Okabe and Ito's colours, which colour-blind people distinguish: on a light and on a dark page.
PALETTE = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8f4d"),
    ("#007a59", "#3fd0a4"),
    ("#a8447f", "#e59ac6"),
    ("#8a6d00", "#f0c94a"),
    ("#5b4bb0", "#a99cf5"),
    ("#4d4d4d", "#c4c4c4"),
    ("#8c2d19", "#e2907f"),
)
INK, GRID, PAGE, QUIET = "#010203", "#d0d0d2", "#fefeff", "#6f6f73"
_NAMED = {
    INK: ("--ink", "#1c2733", "#e6ebf0"),
    GRID: ("--grid", "#dde3e9", "#36414d"),
    PAGE: ("--page", "#fbfcfd", "#1b2129"),
    QUIET: ("--quiet", "#5d6b79", "#9aa7b4"),
}
_NAMED |= {light: (f"--line{i}", light, dark) for i, (light, dark) in enumerate(PALETTE)}


def color(i: int) -> str:
    """The i-th series' colour, for matplotlib."""
    return PALETTE[i % len(PALETTE)][0]


def css(selector: str) -> str:
    """Rules that give `selector` the colours of both themes as custom properties."""
    light = "".join(f"{name}:{value};" for name, value, _ in _NAMED.values())
    dark = "".join(f"{name}:{value};" for name, _, value in _NAMED.values())
    return f"{selector}{{{light}}}@media (prefers-color-scheme: dark){{{selector}{{{dark}}}}}"


@contextlib.contextmanager
def style(name: str) -> Iterator[None]:
    """Matplotlib settings for a figure that `to_svg` writes; `name` must be unique in a page."""
    import matplotlib
    from matplotlib import pyplot as plt

    matplotlib.use("Agg")
    template = pathlib.Path(__file__).with_name("page.mplstyle")
    try:
        with plt.style.context(template), plt.rc_context({"svg.hashsalt": name}):
            yield
    finally:
        plt.close("all")


def to_svg(figure: Any, title: str, *, alone: bool = True) -> str:
    """A figure, drawn within `style`, as an `svg` element.
    title: the text alternative. alone: include the colours of both themes (`css`), for a separate
    file.
    """
    target = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(target, format="svg", metadata=nothing)
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text)
    assert size is not None  # matplotlib writes both
    label = html.escape(title, quote=True)
    head = f'class="mbx-figure" role="img" aria-label="{label}" style="max-width:100%;height:auto"'
    text = text.replace(size[0], f"{size[0]} {head}", 1)
    text = re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]), text)
    for value, (name, *_) in _NAMED.items():
        text = text.replace(value, f"var({name})")
    family = "'DejaVu Sans'"
    text = text.replace(family, "system-ui, 'DejaVu Sans'")
    rules = f"<style>{css('.mbx-figure')}</style>" if alone else ""
    return text.replace("<defs>", f"<title>{html.escape(title)}</title>{rules}<defs>", 1)
