"""Plots of results: speed-ups by set, grids of settings, and what a pass costs.

They are as wide as a phone's screen, so that letters are legible there. The colours are those of
Okabe and Ito for colour-blind readers; hatches and markers distinguish bars and lines in grey.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from eval.decoders import BASELINE
from eval.report.tables import NAMES, column_of, decoders_of

Document = Mapping[str, Any]
Look = tuple[str, str]  # colour and hatch
Draw = Callable[[Axes], None]

WIDTH = 4.7  # inches
BLACK, GREY, ORANGE, SKY = "#000000", "#999999", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILLION, PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"
LINES = ((BLUE, "-", "o"), (VERMILLION, "--", "s"), (GREEN, "-.", "^"), (PURPLE, ":", "D"))
STYLE = {
    "font.family": ["DejaVu Sans"], "font.size": 10, "axes.labelsize": 10, "axes.titlesize": 10,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "xtick.labelsize": 9,
    "ytick.labelsize": 9, "legend.fontsize": 9, "legend.frameon": False, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#dddddd",
    "hatch.linewidth": 0.6, "svg.fonttype": "none",  # text, not outlines: pages can search it
    "svg.hashsalt": "ragaccel",
}  # fmt: skip
LOOKS: dict[str, Look] = {
    "generate": (BLACK, ""), "generate_static": (GREY, "///"),
    "generate_lookup": (ORANGE, "\\\\\\"),
    "ours_plain": (SKY, ""), "ours_paper": (GREEN, "|||"), "ours_tree": (BLUE, ""),
    "ours_full": (VERMILLION, "xxx"), "ours_warm": (PURPLE, "---"),
}  # fmt: skip
OTHERS: tuple[Look, ...] = ((VERMILLION, "xxx"), (GREEN, "|||"), (BLUE, ""), (PURPLE, "---"))
LEGEND = {"ncols": 2, "handlelength": 1.6, "columnspacing": 1.0}


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """Return the look of each decoder; decoders without their own look get unused ones."""
    taken = [LOOKS[name] for name in names if name in LOOKS]
    others = cycle([look for look in OTHERS if look not in taken] or [(GREY, "")])
    return {name: LOOKS.get(name) or next(others) for name in names}


def bars_of(look: Look) -> dict[str, Any]:
    """Return the arguments of a look for matplotlib's bars."""
    colour, hatch = look
    edge = "#ffffff" if colour == BLACK else "#333333"
    return {"color": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.5}


def panels(draws: Sequence[Draw], height: float, *, sharex: bool = True, **legend: Any) -> str:
    """Draw panels below one another and return the SVG, which is deterministic.

    ``height`` is in inches; ``legend`` are arguments of the figure's legend, if any.
    """
    with mpl.rc_context():
        mpl.rcdefaults()  # ignores the user's matplotlibrc
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(draws), sharex=sharex, squeeze=False)[:, 0]
        for one, draw in zip(axes, draws, strict=True):
            draw(one)
        if legend:
            figure.legend(loc="outside upper left", **legend)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def pictures_of(document: Document) -> Iterator[tuple[str, str, str, str]]:
    """Yield the pictures of a result: name, title, alternative text and SVG."""
    kind, settings = document["kind"], document.get("settings", {})
    if kind == "matrix":
        if svg := speedup_svg(document):
            model = f"{settings['model']}, {settings['dtype']}"
            title = f"{model}: how many times as fast as HF greedy, by set"
            yield "speed", title, _spoken(document), svg
    elif kind == "roofline" and document["contexts"]:
        title = f"passes against the memory's bandwidth: {settings['model']}, {settings['device']}"
        alt = "Milliseconds of a pass by its rows, one line a way of running it."
        yield "passes", title, alt, roofline_svg(document)
    elif kind in GRID_AXES and (svg := grid_svg(document)):
        (_, across), (_, down) = GRID_AXES[kind]
        alt = f"Heat maps, one a set: {down} downwards, {across} across, figures in the cells."
        yield "grid", f"{down} x {across}", alt, svg


def _spoken(matrix: Document) -> str:
    return "; ".join(
        f"{title}: "
        + ", ".join(
            f"{column_of(name)} {figures['ratio_generate']:.2f}"
            for name, figures in one["decoders"].items()
            if name != BASELINE and "ratio_generate" in figures
        )
        for title, one in matrix["sets"].items()
    )


BAR, GAP = 0.2, 0.22  # inches of a bar, and between two sets


def speedup_svg(matrix: Document) -> str | None:
    """Return a chart of the decoders' speed-ups over ``model.generate``; None if that never ran."""
    names = [name for name in decoders_of(matrix) if name != BASELINE]
    places: dict[str, list[tuple[float, dict[str, Any]]]] = {}  # of each decoder's bars
    middles, down = {}, 0.0
    for title, one in matrix["sets"].items():
        ran = [name for name in names if "ratio_generate" in one["decoders"].get(name, ())]
        middles[title] = down + BAR * (len(ran) - 1) / 2
        for name in ran:
            places.setdefault(name, []).append((down, one["decoders"][name]))
            down += BAR
        down += GAP
    if not places:
        return None
    looks = looks_of(names)

    def draw(axes: Axes) -> None:
        most = max(_bars(axes, places[name], name, looks[name]) for name in names if name in places)
        axes.axvline(1.0, color=BLACK, linewidth=1.2, linestyle="--", label=column_of(BASELINE))
        axes.set_xlim(0.0, most * 1.15)
        axes.set_xlabel("decoding speed, times HF greedy\n(median of pairs, 95 % interval)")
        axes.set_yticks(list(middles.values()), [one.replace(" (", "\n(") for one in middles])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(down - GAP / 2, -BAR)

    return panels([draw], 1.6 + down, **LEGEND)


def _bars(axes: Any, places: Sequence[tuple[float, Any]], name: str, look: Look) -> float:
    """Draw one decoder's bars with intervals and figures; return the largest upper bound."""
    downs = [down for down, _ in places]
    values = [one["ratio_generate"] for _, one in places]
    bounds = [one["ratio_generate_interval"] for _, one in places]
    errors = [
        [abs(bound[side] - value) for bound, value in zip(bounds, values, strict=True)]
        for side in (0, 1)
    ]
    axes.barh(downs, values, BAR * 0.86, label=column_of(name), **bars_of(look))
    axes.errorbar(values, downs, xerr=errors, fmt="none", ecolor=BLACK, elinewidth=1.2, capsize=2)
    beside = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
    for down, value, (_, high) in zip(downs, values, bounds, strict=True):
        axes.annotate(f"{value:.2f}", (high, down), (4, 0), **beside)
    return float(max(high for _, high in bounds))


GRID_AXES = {
    "llma_sweep": (("k", "tokens fed a pass, k"), ("n", "match length, n")),
    "lookahead_sweep": (
        ("branch_length", "longest branch, tokens"),
        ("decoding_length", "draft tokens a pass"),
    ),
}
"""{kind of sweep: its settings across and downwards, with the titles of the axes}."""
GRID_ROW = 0.3  # inches


def grid_svg(document: Document) -> str | None:
    """Return a heat map for each set of a sweep; None unless both settings vary.

    The figures are speed-ups over plain decoding if the sweep was timed, else tokens a pass.
    """
    (across, across_title), (down, down_title) = GRID_AXES[document["kind"]]
    points = [one for one in document["grid"] if one.get("memory", "cold") == "cold"]
    columns, rows = (sorted({point[name] for point in points}) for name in (across, down))
    if min(len(columns), len(rows)) < 2:
        return None
    is_timed = all("ratio" in point for point in points)
    metric = "ratio" if is_timed else "tokens_per_pass"
    sets = list(dict.fromkeys(point["set"] for point in points))

    def draw(axes: Axes, name: str) -> None:
        found = {(p[down], p[across]): p[metric] for p in points if p["set"] == name}
        _map(axes, [[found[row, column] for column in columns] for row in rows])
        axes.set_title(name)
        axes.set_xticks([at + 0.5 for at in range(len(columns))], list(map(str, columns)))
        axes.set_yticks([at + 0.5 for at in range(len(rows))], list(map(str, rows)))
        axes.set_ylabel(down_title)
        axes.tick_params(length=0)
        if name == sets[-1]:
            told = "decoding speed, times plain decoding" if is_timed else "tokens a pass"
            axes.set_xlabel(f"{across_title}\n(in the cells: {told})")

    height = 0.6 + len(sets) * (0.6 + max(1.3, GRID_ROW * len(rows)))
    return panels([partial(draw, name=one) for one in sets], height, sharex=False)


def _map(axes: Axes, cells: Sequence[Sequence[float]]) -> None:
    """Draw one heat map, from dark to bright, with its figure in each cell."""
    known = [value for row in cells for value in row]
    axes.pcolormesh(cells, cmap="cividis", edgecolors="#ffffff", linewidth=0.5)
    size = min(9.0, 72 * (WIDTH - 0.8) / len(cells[0]) / 2.6)
    middle = {"ha": "center", "va": "center", "fontsize": size}
    for down, row in enumerate(cells):
        for across, value in enumerate(row):
            color = "#ffffff" if value < (min(known) + max(known)) / 2 else BLACK
            axes.text(across + 0.5, down + 0.5, f"{value:.2f}", color=color, **middle)


TICKS = (1, 2, 4, 8, 16, 32, 64)


def roofline_svg(document: Document) -> str:
    """Return a plot of a pass's milliseconds: a panel per context, a line per way, the limit."""
    contexts = document["contexts"]

    def draw(axes: Axes, context: str) -> None:
        limit = 1e3 * contexts[context]["limit_seconds"]
        ways = contexts[context]["ways"].items()
        for (way, figures), (color, dashes, marker) in zip(ways, LINES, strict=False):
            if "milliseconds" in figures:
                rows = [int(num) for num in figures["milliseconds"]]
                label = NAMES[way] if context == next(iter(contexts)) else None
                look = {"color": color, "linestyle": dashes, "marker": marker, "markersize": 5}
                axes.plot(rows, list(figures["milliseconds"].values()), label=label, **look)
        axes.axhline(limit, color=BLACK, linewidth=1.2)
        beside = {"textcoords": "offset points", "ha": "right", "va": "top", "fontsize": 8.5}
        told = f"limit of the bandwidth, {limit:.3g} ms"
        axes.annotate(told, (max(TICKS), limit), (0, -3), **beside)
        axes.set_title(f"{int(context):,} tokens of context")
        axes.set_ylabel("milliseconds a pass")
        axes.set_xscale("log", base=2)
        axes.set_xticks(TICKS, list(map(str, TICKS)))
        axes.set_ylim(bottom=0.0)
        axes.grid(visible=True, axis="y")
        if context == list(contexts)[-1]:
            axes.set_xlabel("rows of a pass, n (its draft tokens and one)")

    draws = [partial(draw, context=one) for one in contexts]
    return panels(draws, 0.8 + 2.6 * len(contexts), ncols=1, handlelength=3.0)
