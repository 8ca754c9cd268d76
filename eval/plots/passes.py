"""Passes: what a verify pass costs by its rows, beside the limit that memory's bandwidth sets."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from eval.plots.style import CYCLE, DASHES, MARKERS, drawn
from eval.tables import WAYS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Document = Mapping[str, Any]

TICKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a pass by its rows, and what no pass of one row can be faster than."""

    name: str
    milliseconds: Mapping[int, float]
    limit: float | None = None


def curves_of(documents: Sequence[Document]) -> list[Curve]:
    """One curve a model and dtype: medians over the speed results that measured its passes.

    The limit is that of the roofline results of the same model, dtype and device, over the
    shortest context.
    """
    groups: dict[tuple[str, str, str], list[Document]] = {}
    for one in documents:
        if one["kind"] == "speed" and one.get("milliseconds"):
            groups.setdefault(_measured(one), []).append(one)
    return [
        Curve(
            f"{key[0].removeprefix('random:')}, {key[1]}",
            {
                int(rows): median(one["milliseconds"][rows] for one in group)
                for rows in group[0]["milliseconds"]
                if all(rows in one["milliseconds"] for one in group)
            },
            _limit(documents, key),
        )
        for key, group in groups.items()
    ]


def _measured(one: Document) -> tuple[str, str, str]:
    settings = one["settings"]
    return settings["model"], settings["dtype"], settings.get("device", "cpu")


def _limit(documents: Sequence[Document], key: tuple[str, str, str]) -> float | None:
    for one in documents:
        if one["kind"] == "roofline" and _measured(one) == key:
            shortest = min(one["contexts"], key=int)
            return 1e3 * float(one["contexts"][shortest]["limit_seconds"])
    return None


def cost_svg(curves: Sequence[Curve]) -> str:
    """Draw t(n) / t(1), one line a model; the flat lines of the limit in the same colours."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            one = curve.milliseconds[1]
            label = f"{curve.name}, t(1) = {one:.3g} ms"
            _line(axes, number, {n: ms / one for n, ms in curve.milliseconds.items()}, label)
            if curve.limit:
                axes.axhline(curve.limit / one, color=CYCLE[number % len(CYCLE)], linewidth=1.0)
                axes.annotate(
                    f"limit of the bandwidth, {curve.limit / one:.2f}",
                    (max(TICKS), curve.limit / one),
                    (0, -3),
                    textcoords="offset points",
                    ha="right",
                    va="top",
                    fontsize=8.5,
                )
        axes.set_ylabel("time of a pass, t(n) / t(1)")
        _finish(figure, axes)

    return drawn(draw, 3.2 + 0.2 * len(curves))


def roofline_svg(document: Document) -> str:
    """Draw milliseconds of a pass: one panel a context, one line a way, the limit flat."""
    contexts = document["contexts"]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(contexts), sharex=True, squeeze=False)[:, 0]
        for axes, (context, found) in zip(panels, contexts.items(), strict=True):
            limit = 1e3 * found["limit_seconds"]
            for number, (way, figures) in enumerate(found["ways"].items()):
                if "milliseconds" in figures:
                    times = {int(n): ms for n, ms in figures["milliseconds"].items()}
                    _line(axes, number, times, WAYS[way] if axes is panels[0] else None)
            axes.axhline(limit, color="#000000", linewidth=1.2)
            axes.annotate(
                f"limit of the bandwidth, {limit:.3g} ms",
                (max(TICKS), limit),
                (0, -3),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=8.5,
            )
            axes.set_title(f"{int(context):,} tokens of context", fontweight="bold")
            axes.set_ylabel("milliseconds a pass")
            _finish(figure, axes, legend=axes is panels[0], last=axes is panels[-1])

    return drawn(draw, 0.8 + 2.6 * len(contexts))


def _line(axes: Axes, number: int, times: Mapping[int, float], label: str | None) -> None:
    axes.plot(
        list(times),
        list(times.values()),
        color=CYCLE[number % len(CYCLE)],
        linestyle=DASHES[number % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
        linewidth=1.5,
        label=label,
    )


def _finish(figure: Figure, axes: Axes, *, legend: bool = True, last: bool = True) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, list(map(str, TICKS)))
    axes.set_ylim(bottom=0.0)
    axes.grid(visible=True, axis="y")
    if last:
        axes.set_xlabel("rows of a pass, n (its guesses and one)")
    if legend:
        figure.legend(loc="outside upper left", ncols=1, handlelength=3.0)
