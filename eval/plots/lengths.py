"""Lengths: how many tokens a verify pass ends in, as histograms, one panel a set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.matrices import Matrix, name_of
from eval.plots.style import drawn, looks_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

SHOWN = ("generate_lookup", "ours_paper", "ours_tree", "ours_full")
LONGEST = 12  # longer ones share the last bar


def lengths_svg(matrix: Matrix) -> str | None:
    """Draw the share of passes by tokens they end in; None where no result tells."""
    sets = {title: _histograms(one) for title, one in matrix.sets.items()}
    sets = {title: own for title, own in sets.items() if own}
    if not sets:
        return None
    names = list(dict.fromkeys(name for own in sets.values() for name in own))
    looks = looks_of(names)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(sets), sharex=True, squeeze=False)[:, 0]
        width = 0.86 / len(names)
        for axes, (title, own) in zip(panels, sets.items(), strict=True):
            axes.set_title(title, fontweight="bold")
            axes.set_ylabel("passes, %")
            for number, name in enumerate(names):
                heights = shares(own.get(name, {}))
                at = [
                    length + (number - (len(names) - 1) / 2) * width
                    for length in range(1, LONGEST + 2)
                ]
                label = name_of(name) if axes is panels[0] else None
                axes.bar(at, heights, width, label=label, **looks[name].of_bars)
        ticks = [*range(1, LONGEST + 1, 2), LONGEST + 1]
        panels[-1].set_xticks(ticks, [*map(str, ticks[:-1]), f"> {LONGEST}"])
        panels[-1].set_xlabel("tokens that a pass ends in (1: no guess was right)")
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.6, columnspacing=1.0)

    return drawn(draw, 1.0 + 1.35 * len(sets))


def shares(histogram: Mapping[str, int]) -> list[float]:
    """Percent of passes by length, from 1 to ``LONGEST`` and all longer ones together."""
    passes = sum(histogram.values())
    counts = [histogram.get(str(length), 0) for length in range(1, LONGEST + 1)]
    longer = sum(count for length, count in histogram.items() if int(length) > LONGEST)
    return [100.0 * count / passes if passes else 0.0 for count in (*counts, longer)]


def _histograms(document: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    contenders = document["contenders"]
    return {
        name: contenders[name]["acceptance_histogram"]
        for name in SHOWN
        if contenders.get(name, {}).get("acceptance_histogram")
    }
