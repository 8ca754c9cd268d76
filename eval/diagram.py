"""The reliability diagram: estimated chances against the share accepted, as an SVG picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS = 3
SIDE = 150  # of the square in which a panel's dots stand
LEFT, TOP, WIDTH, HEIGHT = 52, 54, 226, 238  # where that square stands in its panel; the panel
MARGIN, FOOT = 18, 22  # for the names of the axes
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#222222">'
)


def reliability_svg(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw one panel a source, both axes logarithmic: a dot a bin, the diagonal where all is right.

    A hollow dot on the lower edge stands for a bin of which less was accepted than the axis shows.
    """
    rows = -(-len(sources) // COLUMNS)
    width = MARGIN + COLUMNS * WIDTH
    height = rows * HEIGHT + FOOT
    decades = _decades(sources)
    parts = [
        _HEAD.format(width=width, height=height),
        "<title>Estimated chances of acceptance against the share accepted</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">estimated chance</text>',
        f'<text transform="translate(14 {(height - FOOT) / 2:.0f}) rotate(-90)" '
        'text-anchor="middle">share accepted</text>',
    ]
    for number, (source, figures) in enumerate(sources.items()):
        row, column = divmod(number, COLUMNS)
        place = f"translate({MARGIN + column * WIDTH} {row * HEIGHT})"
        parts += [f'<g transform="{place}">', *_panel(source, figures, decades), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(sources: Mapping[str, Mapping[str, Any]]) -> int:
    """How many powers of ten below 1 hold all bins' mean estimates."""
    least = min((bin_[0] for figures in sources.values() for bin_ in figures["bins"]), default=1.0)
    return min(4, max(1, math.ceil(-math.log10(max(least, 1e-9)))))


def _panel(source: str, figures: Mapping[str, Any], decades: int) -> list[str]:
    right, bottom = LEFT + SIDE, TOP + SIDE
    return [
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{escape(source)}</text>',
        f'<text x="{LEFT}" y="33" fill="#555555">{figures["guesses"]:,} guesses</text>',
        f'<text x="{LEFT}" y="47" fill="#555555">calibration error '
        f"{figures['calibration_error']:.4f}</text>",
        *_grid(decades),
        f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{TOP}" stroke="#888888" '
        'stroke-dasharray="4 3"/>',
        *[_dot(estimate, share, decades) for estimate, share, _ in figures["bins"]],
    ]


def _grid(decades: int) -> list[str]:
    """A line for each power of ten on both axes, with its name."""
    right, bottom = LEFT + SIDE, TOP + SIDE
    lines = []
    for power in range(decades + 1):
        along = SIDE * (1 - power / decades)
        x, y, name = LEFT + along, bottom - along, f"{10.0**-power:g}"
        lines += [
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>',
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>',
            f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{name}</text>',
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{name}</text>',
        ]
    return lines


def _dot(estimate: float, share: float, decades: int) -> str:
    x = LEFT + SIDE * _along(estimate, decades)
    y = TOP + SIDE * (1 - _along(share, decades))
    shown = share >= 10.0**-decades
    look = 'fill="#1f6fb4"' if shown else 'fill="#ffffff" stroke="#1f6fb4"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {look}/>'


def _along(chance: float, decades: int) -> float:
    """Where a chance stands on an axis: 0 at its lower end, 1 at certainty."""
    return max(0.0, 1 + math.log10(max(chance, 1e-9)) / decades)
