"""Bars: speed-ups over ``model.generate`` with their spread, by set and decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.contenders import BASELINE
from eval.matrices import name_of
from eval.plots.style import BLACK, drawn, looks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from matplotlib.figure import Figure

    from eval.matrices import Matrix
    from eval.plots.style import Look

    Place = tuple[float, str, str]  # how far down, the set, the decoder

BAR, GAP = 0.2, 0.22  # inches of a bar, and between two sets


def speedup_svg(matrix: Matrix) -> str | None:
    """Draw how many times as fast as ``model.generate`` each decoder is; None if it never ran."""
    known = {
        (title, name): figures
        for title, one in matrix.sets.items()
        for name, figures in one["contenders"].items()
        if name != BASELINE and "ratio_generate" in figures
    }
    names = [name for name in matrix.contenders if any(name == own for _, own in known)]
    if not names:
        return None
    sets = {title: [n for n in names if (title, n) in known] for title in matrix.sets}
    places = list(places_of(sets))
    looks = looks_of(names)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        most = 1.0
        for name in names:
            own = [(down, known[title, name]) for down, title, n in places if n == name]
            downs, figures = [down for down, _ in own], [one for _, one in own]
            most = max(most, _spread(axes, downs, figures, name, looks[name]))
        axes.axvline(1.0, color=BLACK, linewidth=1.2, linestyle="--", label=name_of(BASELINE))
        axes.set_xlim(0.0, most * 1.15)
        axes.set_xlabel("decoding speed, times HF greedy\n(median of pairs, 95 % interval)")
        _name_sets(axes, places)
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.6, columnspacing=1.0)

    return drawn(draw, 1.6 + length_of(places))


def _spread(axes: Any, downs: list[float], figures: list[Any], name: str, look: Look) -> float:
    """Draw one decoder's bars, each with its interval and its figure; how far they reach."""
    values = [one["ratio_generate"] for one in figures]
    bounds = [one["ratio_generate_interval"] for one in figures]
    errors = [
        [value - low for value, (low, _) in zip(values, bounds, strict=True)],
        [high - value for value, (_, high) in zip(values, bounds, strict=True)],
    ]
    axes.barh(downs, values, BAR * 0.86, label=name_of(name), **look.of_bars)
    axes.errorbar(values, downs, xerr=errors, fmt="none", ecolor=BLACK, elinewidth=1.2, capsize=2)
    for down, value, (_, high) in zip(downs, values, bounds, strict=True):
        beside = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
        axes.annotate(f"{value:.2f}", (high, down), (4, 0), **beside)
    return max((high for _, high in bounds), default=0.0)


def places_of(sets: Mapping[str, Iterable[str]]) -> Iterator[Place]:
    """How far down each bar stands, in inches: those of a set together."""
    down = 0.0
    for title, names in sets.items():
        for name in names:
            yield down, title, name
            down += BAR
        down += GAP


def length_of(places: list[Place]) -> float:
    return places[-1][0] + GAP if places else GAP


def _name_sets(axes: Any, places: list[Place]) -> None:
    downs: dict[str, list[float]] = {}
    for down, title, _ in places:
        downs.setdefault(title, []).append(down)
    middles = [(own[0] + own[-1]) / 2 for own in downs.values()]
    axes.set_yticks(middles, [title.replace(" (", "\n(") for title in downs])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(length_of(places) - GAP / 2, -BAR)
