"""Guesses ahead: tokens a pass over training steps, and by the number of mask tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.papers.space_decoders import BOTH, COPY, GUESSES, TREE
from eval.papers.space_layout import label_of, papers
from eval.plots.style import BLACK, CYCLE, DASHES, MARKERS, drawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Points = Mapping[int, float]

LEVELS = tuple(f"{name}_{GUESSES}" for name in (TREE, COPY, BOTH))


def curves_svg(curve: Sequence[Mapping[str, Any]]) -> str:
    """Draw tokens a pass: over steps one line a number of mask tokens; then by it at the end."""
    num_masks = len(curve[-1]["tokens_per_pass"])

    def draw(figure: Figure) -> None:
        over, last = figure.subplots(2, squeeze=False)[:, 0]
        for k in range(num_masks):
            points = {one["step"]: one["tokens_per_pass"][k] for one in curve}
            _line(over, k, points, f"k = {k + 1}")
        over.set_xlabel("steps of training")
        by_k = {k + 1: value for k, value in enumerate(curve[-1]["tokens_per_pass"])}
        _line(last, 0, by_k, None)
        _mask_axis(last, list(by_k))
        last.set_title(f"after {curve[-1]['step']:,} steps", fontweight="bold")
        for axes in (over, last):
            axes.set_ylabel("tokens a pass")
            axes.grid(visible=True, axis="y")
        figure.legend(loc="outside upper left", ncols=4, handlelength=2.6, columnspacing=1.0)

    return drawn(draw, 5.2)


def masks_svg(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw tokens a pass by mask tokens as published, others' as flat lines: one panel a set."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(sets), sharex=True, squeeze=False)[:, 0]
        for axes, (title, figures) in zip(panels, sets.items(), strict=True):
            greedy, is_first = figures["greedy"], axes is panels[0]
            by_k = {k: one["tokens_per_pass"] for k, one in papers(greedy).items()}
            _line(axes, 0, by_k, "SPACE as published" if is_first else None)
            for number, name in enumerate(LEVELS, start=1):
                axes.axhline(
                    greedy[name]["tokens_per_pass"],
                    color=CYCLE[number],
                    linestyle=DASHES[number],
                    label=label_of(name) if is_first else None,
                )
            axes.axhline(1.0, color=BLACK, linewidth=0.8)
            axes.set_title(title, fontweight="bold")
            axes.set_ylabel("tokens a pass")
            axes.grid(visible=True, axis="y")
            _mask_axis(axes, list(by_k), last=axes is panels[-1])
        figure.legend(loc="outside upper left", ncols=1, handlelength=3.0)

    return drawn(draw, 1.2 + 2.2 * len(sets))


def _line(axes: Axes, number: int, points: Points, label: str | None) -> None:
    axes.plot(
        list(points),
        list(points.values()),
        color=CYCLE[number % len(CYCLE)],
        linestyle=DASHES[number % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
        linewidth=1.5,
        label=label,
    )


def _mask_axis(axes: Axes, ks: list[int], *, last: bool = True) -> None:
    axes.set_xticks(ks, list(map(str, ks)))
    if last:
        axes.set_xlabel("mask tokens, k")
