"""The reliability diagram: estimated chances of acceptance against the share accepted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from eval.plots.style import BLUE, drawn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 2


def reliability_svg(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw one panel a source, both axes logarithmic: a dot a bin, the diagonal where all is right.

    A hollow dot on the lower edge stands for a bin of which less was accepted than the axis shows.
    """
    rows = -(-len(sources) // COLUMNS)
    decades = [10.0**-power for power in range(_decades(sources), -1, -1)]
    least = decades[0]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
        for axes, (source, figures) in zip(panels, sources.items(), strict=False):
            _panel(axes, figures, least)
            axes.set_title(source, fontweight="bold")
            for axis in (axes.xaxis, axes.yaxis):  # not as powers, whose exponents are tiny
                axis.set_ticks(decades, [f"{one:g}" for one in decades])
        for axes in list(panels)[len(sources) :]:
            axes.set_axis_off()
        figure.supxlabel("estimated chance of acceptance", fontsize=10)
        figure.supylabel("share accepted", fontsize=10)

    return drawn(draw, 0.4 + 2.3 * rows)


def _decades(sources: Mapping[str, Mapping[str, Any]]) -> int:
    """How many powers of ten below 1 hold all bins' mean estimates."""
    least = min((bin_[0] for figures in sources.values() for bin_ in figures["bins"]), default=1.0)
    return min(4, max(1, math.ceil(-math.log10(max(least, 1e-9)))))


def _panel(axes: Axes, figures: Mapping[str, Any], least: float) -> None:
    axes.set(xscale="log", yscale="log", xlim=(least * 0.7, 1.5), ylim=(least * 0.7, 1.5))
    axes.minorticks_off()
    axes.set_box_aspect(1)
    axes.grid(visible=True)
    axes.plot([least, 1.0], [least, 1.0], color="#777777", linestyle="--", linewidth=1.0)
    bins = [(max(estimate, least), share) for estimate, share, _ in figures["bins"]]
    shown = [(estimate, share) for estimate, share in bins if share >= least]
    below = [(estimate, least) for estimate, share in bins if share < least]
    for dots, fill in ((shown, BLUE), (below, "#ffffff")):
        if dots:
            xs, ys = zip(*dots, strict=True)
            axes.plot(xs, ys, "o", color=BLUE, markerfacecolor=fill, markersize=5, clip_on=False)
    told = f"{figures['guesses']:,} guesses\nerror {figures['calibration_error']:.4f}"
    axes.text(0.05, 0.95, told, transform=axes.transAxes, va="top", fontsize=8.5)
