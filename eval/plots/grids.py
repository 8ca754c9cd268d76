"""Grids: heat maps of two settings of a drafter, one map a figure that was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.plots.style import WIDTH, drawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Points = Sequence[Mapping[str, Any]]

AXES = {
    "llma_sweep": (("k", "tokens fed a pass, k"), ("n", "match length, n")),
    "lookahead_sweep": (
        ("branch_length", "longest branch, tokens"),
        ("decoding_length", "guesses a pass"),
    ),
}
METRICS = {
    "tokens_per_pass": "tokens a pass",
    "ratio": "decoding speed, times plain decoding",
    "triggered": "share of passes with a draft",
    "accepted_per_trigger": "guesses accepted a pass with a draft",
}
ROW = 0.3  # inches


def sets_of(document: Mapping[str, Any]) -> dict[str, Points]:
    """The points of a sweep's grid, by set; of drafters with and without memory those without."""
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for point in document["grid"]:
        if point.get("memory", "cold") == "cold":
            sets.setdefault(str(point.get("set", "")), []).append(point)
    return sets


def grid_svg(kind: str, points: Points) -> str | None:
    """Draw one map a measured figure; None where the points do not vary in both settings."""
    (across, across_title), (down, down_title) = AXES[kind]
    columns, rows = _values(points, across), _values(points, down)
    metrics = [
        metric for metric in METRICS if any(point.get(metric) is not None for point in points)
    ]
    if min(len(columns), len(rows)) < 2 or not metrics:
        return None

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(metrics), squeeze=False)[:, 0]
        for axes, metric in zip(panels, metrics, strict=True):
            found = {(p[down], p[across]): p[metric] for p in points if p.get(metric) is not None}
            _map(axes, [[found.get((row, column)) for column in columns] for row in rows])
            axes.set_title(METRICS[metric], fontweight="bold")
            axes.set_xticks([at + 0.5 for at in range(len(columns))], list(map(str, columns)))
            axes.set_yticks([at + 0.5 for at in range(len(rows))], list(map(str, rows)))
            axes.set_ylabel(down_title)
            axes.tick_params(length=0)
        panels[-1].set_xlabel(across_title)

    return drawn(draw, 0.4 + len(metrics) * (0.6 + max(1.3, ROW * len(rows))))


def _values(points: Points, name: str) -> list[Any]:
    return sorted({point[name] for point in points if name in point})


def _map(axes: Axes, rows: list[list[float | None]]) -> None:
    """Fill cells from dark to bright and write each figure into its own."""
    known = [value for row in rows for value in row if value is not None]
    low, high = min(known), max(known)
    cells = [[float("nan") if value is None else value for value in row] for row in rows]
    axes.pcolormesh(cells, cmap="cividis", edgecolors="#ffffff", linewidth=0.5)
    size = min(9.0, 72 * (WIDTH - 0.8) / len(rows[0]) / 2.6)
    for down, row in enumerate(rows):
        for across, value in enumerate(row):
            if value is None:
                continue
            dark = value < (low + high) / 2
            axes.text(
                across + 0.5,
                down + 0.5,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=size,
                color="#ffffff" if dark else "#000000",
            )
