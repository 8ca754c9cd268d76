"""Plots of the results in a folder.

They are as wide as a phone's screen, so that letters are legible there. The colours are those of
Okabe and Ito for colour-blind readers; hatches and markers distinguish bars and lines in grey.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from eval.decoders import BASELINE
from eval.papers.space import BOTH, COPY, NUM_DRAFT_TOKENS, TREE, label_of, papers
from eval.report.matrices import Matrix, matrices, name_of
from eval.report.page import Picture
from eval.report.tables import PASS_WAYS
from eval.runner import caption_of, caption_of_many, note

Place = tuple[float, str, str]  # (distance from the top, set, decoder)
GridPoints = Sequence[Mapping[str, Any]]
Points = Mapping[int, float]
Document = Mapping[str, Any]
Bars = Mapping[str, Mapping[str, Mapping[str, float]]]  # {set: {bar: {stage: milliseconds}}}
Documents = Mapping[str, dict[str, Any]]

WIDTH = 4.7  # inches
BLACK, GREY, ORANGE, SKY = "#000000", "#999999", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILLION, PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":") * 2
STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text, not outlines: pages can search it
    "svg.hashsalt": "ragaccel",
}


@dataclass(frozen=True, slots=True)
class Look:
    """The colour and the hatch of the bars of one decoder or stage."""

    colour: str
    hatch: str = ""

    @property
    def of_bars(self) -> dict[str, Any]:
        """Return the arguments for matplotlib's bars."""
        edge = {"edgecolor": "#ffffff" if self.colour == BLACK else "#333333", "linewidth": 0.5}
        return {"color": self.colour, "hatch": self.hatch, **edge}


LOOKS = {
    "generate": Look(BLACK),
    "generate_static": Look(GREY, "///"),
    "generate_lookup": Look(ORANGE, "\\\\\\"),
    "ours_plain": Look(SKY),
    "ours_paper": Look(GREEN, "|||"),
    "ours_tree": Look(BLUE),
    "ours_full": Look(VERMILLION, "xxx"),
    "ours_warm": Look(PURPLE, "---"),
}
OTHERS = (Look(VERMILLION, "xxx"), Look(GREEN, "|||"), Look(BLUE), Look(PURPLE, "---"))


def looks_of(names: list[str]) -> dict[str, Look]:
    """Return the look of each decoder; decoders without their own look get unused ones."""
    taken = [LOOKS[name] for name in names if name in LOOKS]
    others = cycle([look for look in OTHERS if look not in taken] or [Look(GREY)])
    return {name: LOOKS.get(name) or next(others) for name in names}


def drawn(draw: Callable[[Figure], None], height: float) -> str:
    """Draw on a figure of standard width and return the SVG, which is deterministic.

    ``height`` is in inches.
    """
    with mpl.rc_context():
        mpl.rcdefaults()  # ignores the user's matplotlibrc
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def panels(
    draws: Sequence[Callable[[Axes], None]], height: float, *, sharex: bool = True, **legend: Any
) -> str:
    """Draw panels below one another; ``legend`` are arguments of the figure's legend, if any."""

    def draw(figure: Figure) -> None:
        for axes, one in zip(
            figure.subplots(len(draws), sharex=sharex, squeeze=False)[:, 0], draws, strict=True
        ):
            one(axes)
        if legend:
            figure.legend(loc="outside upper left", **legend)

    return drawn(draw, height)


BARS_LEGEND = {"ncols": 2, "handlelength": 1.6, "columnspacing": 1.0}
BAR, GAP = 0.2, 0.22  # inches of a bar, and between two sets


def speedup_svg(matrix: Matrix) -> str | None:
    """Return a chart of the decoders' speed-ups over ``model.generate``; None if that never ran."""
    known = {
        (title, name): figures
        for title, one in matrix.sets.items()
        for name, figures in one["decoders"].items()
        if name != BASELINE and "ratio_generate" in figures
    }
    names = [name for name in matrix.decoders if any(name == own for _, own in known)]
    if not names:
        return None
    sets = {title: [n for n in names if (title, n) in known] for title in matrix.sets}
    places = list(places_of(sets))
    looks = looks_of(names)

    def draw(axes: Axes) -> None:
        most = 1.0
        for name in names:
            own = {down: known[title, name] for down, title, n in places if n == name}
            most = max(most, _spread(axes, own, name, looks[name]))
        axes.axvline(1.0, color=BLACK, linewidth=1.2, linestyle="--", label=name_of(BASELINE))
        axes.set_xlim(0.0, most * 1.15)
        axes.set_xlabel("decoding speed, times HF greedy\n(median of pairs, 95 % interval)")
        _name_sets(axes, places)

    return panels([draw], 1.6 + length_of(places), **BARS_LEGEND)


def _spread(axes: Any, known: Mapping[float, Any], name: str, look: Look) -> float:
    """Draw one decoder's bars with intervals and figures; return the largest upper bound."""
    values = [one["ratio_generate"] for one in known.values()]
    lows, highs = zip(*(one["ratio_generate_interval"] for one in known.values()), strict=True)
    errors = [
        [value - low for value, low in zip(values, lows, strict=True)],
        [high - value for value, high in zip(values, highs, strict=True)],
    ]
    downs = list(known)
    axes.barh(downs, values, BAR * 0.86, label=name_of(name), **look.of_bars)
    axes.errorbar(values, downs, xerr=errors, fmt="none", ecolor=BLACK, elinewidth=1.2, capsize=2)
    for down, value, high in zip(downs, values, highs, strict=True):
        beside = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
        axes.annotate(f"{value:.2f}", (high, down), (4, 0), **beside)
    return float(max(highs))


def places_of(sets: Mapping[str, Iterable[str]]) -> Iterator[Place]:
    """Yield (vertical position in inches, set, decoder) for each bar, grouped by set."""
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


GRID_AXES = {
    "llma_sweep": (("k", "tokens fed a pass, k"), ("n", "match length, n")),
    "lookahead_sweep": (
        ("branch_length", "longest branch, tokens"),
        ("decoding_length", "draft tokens a pass"),
    ),
}
GRID_METRICS = {
    "tokens_per_pass": "tokens a pass",
    "ratio": "decoding speed, times plain decoding",
    "triggered": "share of passes with a draft",
    "accepted_per_trigger": "draft tokens accepted a pass with a draft",
}
GRID_ROW = 0.3  # inches


def sets_of(document: Mapping[str, Any]) -> dict[str, GridPoints]:
    """Return the points of a sweep's grid by set, only those of cold drafters."""
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for point in document["grid"]:
        if point.get("memory", "cold") == "cold":
            sets.setdefault(str(point.get("set", "")), []).append(point)
    return sets


def grid_svg(kind: str, points: GridPoints) -> str | None:
    """Return a heat map for each figure; None unless the points vary in both settings."""
    (across, across_title), (down, down_title) = GRID_AXES[kind]
    columns, rows = (
        sorted({point[name] for point in points if name in point}) for name in (across, down)
    )
    metrics = [
        metric for metric in GRID_METRICS if any(point.get(metric) is not None for point in points)
    ]
    if min(len(columns), len(rows)) < 2 or not metrics:
        return None

    def draw(axes: Axes, metric: str) -> None:
        found = {(p[down], p[across]): p[metric] for p in points if p.get(metric) is not None}
        _map(axes, [[found.get((row, column)) for column in columns] for row in rows])
        axes.set_title(GRID_METRICS[metric], fontweight="bold")
        axes.set_xticks([at + 0.5 for at in range(len(columns))], list(map(str, columns)))
        axes.set_yticks([at + 0.5 for at in range(len(rows))], list(map(str, rows)))
        axes.set_ylabel(down_title)
        axes.tick_params(length=0)
        if metric == metrics[-1]:
            axes.set_xlabel(across_title)

    height = 0.4 + len(metrics) * (0.6 + max(1.3, GRID_ROW * len(rows)))
    return panels([partial(draw, metric=one) for one in metrics], height, sharex=False)


def _map(axes: Axes, rows: list[list[float | None]]) -> None:
    """Draw one heat map, from dark to bright, with its figure in each cell."""
    known = [value for row in rows for value in row if value is not None]
    low, high = min(known), max(known)
    cells = [[float("nan") if value is None else value for value in row] for row in rows]
    axes.pcolormesh(cells, cmap="cividis", edgecolors="#ffffff", linewidth=0.5)
    size = min(9.0, 72 * (WIDTH - 0.8) / len(rows[0]) / 2.6)
    middle = {"ha": "center", "va": "center", "fontsize": size}
    for down, row in enumerate(rows):
        for across, value in enumerate(row):
            if value is not None:
                color = "#ffffff" if value < (low + high) / 2 else "#000000"
                axes.text(across + 0.5, down + 0.5, f"{value:.2f}", color=color, **middle)


LEVELS = tuple(f"{name}_{NUM_DRAFT_TOKENS}" for name in (TREE, COPY, BOTH))


def curves_svg(curve: Sequence[Mapping[str, Any]]) -> str:
    """Return plots of tokens per pass: over training steps, and at the end by mask tokens."""
    last = curve[-1]["tokens_per_pass"]

    def over_steps(axes: Axes) -> None:
        for k in range(len(last)):
            points = {one["step"]: one["tokens_per_pass"][k] for one in curve}
            _line(axes, k, points, f"k = {k + 1}")
        axes.set_xlabel("steps of training")
        _tokens_axis(axes)

    def at_the_end(axes: Axes) -> None:
        by_k = {k + 1: value for k, value in enumerate(last)}
        _line(axes, 0, by_k, None)
        _mask_axis(axes, list(by_k))
        axes.set_title(f"after {curve[-1]['step']:,} steps", fontweight="bold")
        _tokens_axis(axes)

    legend = {"ncols": 4, "handlelength": 2.6, "columnspacing": 1.0}
    return panels([over_steps, at_the_end], 5.2, sharex=False, **legend)


def masks_svg(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a plot of tokens per pass by mask tokens, one panel per set.

    Other decoders are flat lines.
    """
    first, *_, last = [*sets, *sets]

    def draw(axes: Axes, title: str) -> None:
        greedy, is_first = sets[title]["greedy"], title == first
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
        _tokens_axis(axes)
        _mask_axis(axes, list(by_k), last=title == last)

    draws = [partial(draw, title=title) for title in sets]
    return panels(draws, 1.2 + 2.2 * len(sets), ncols=1, handlelength=3.0)


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


def _tokens_axis(axes: Axes) -> None:
    axes.set_ylabel("tokens a pass")
    axes.grid(visible=True, axis="y")


def _mask_axis(axes: Axes, ks: list[int], *, last: bool = True) -> None:
    axes.set_xticks(ks, list(map(str, ks)))
    if last:
        axes.set_xlabel("mask tokens, k")


LENGTHS_SHOWN = ("generate_lookup", "ours_paper", "ours_tree", "ours_full")
LONGEST = 12  # longer ones share the last bar


def lengths_svg(matrix: Matrix) -> str | None:
    """Return a chart of the shares of passes by number of tokens; None without histograms."""
    sets = {title: _histograms(one) for title, one in matrix.sets.items()}
    sets = {title: own for title, own in sets.items() if own}
    if not sets:
        return None
    names = list(dict.fromkeys(name for own in sets.values() for name in own))
    looks = looks_of(names)
    width = 0.86 / len(names)
    first, *_, last = [*sets, *sets]

    def draw(axes: Axes, title: str) -> None:
        axes.set_title(title, fontweight="bold")
        axes.set_ylabel("passes, %")
        for number, name in enumerate(names):
            shift = (number - (len(names) - 1) / 2) * width
            at = [length + shift for length in range(1, LONGEST + 2)]
            label = name_of(name) if title == first else None
            heights = shares(sets[title].get(name, {}))
            axes.bar(at, heights, width, label=label, **looks[name].of_bars)
        if title == last:
            ticks = [*range(1, LONGEST + 1, 2), LONGEST + 1]
            axes.set_xticks(ticks, [*map(str, ticks[:-1]), f"> {LONGEST}"])
            axes.set_xlabel("tokens that a pass ends in (1: no draft token was right)")

    draws = [partial(draw, title=title) for title in sets]
    return panels(draws, 1.0 + 1.35 * len(sets), **BARS_LEGEND)


def shares(histogram: Mapping[str, int]) -> list[float]:
    """Return the percentages of passes by length from 1 to ``LONGEST``, which includes longer."""
    passes = sum(histogram.values())
    counts = [histogram.get(str(length), 0) for length in range(1, LONGEST + 1)]
    longer = sum(count for length, count in histogram.items() if int(length) > LONGEST)
    return [100.0 * count / passes if passes else 0.0 for count in (*counts, longer)]


def _histograms(document: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    decoders = document["decoders"]
    return {
        name: decoders[name]["acceptance_histogram"]
        for name in LENGTHS_SHOWN
        if decoders.get(name, {}).get("acceptance_histogram")
    }


TICKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a pass by its rows, with the bandwidth's lower limit for one row."""

    name: str
    milliseconds: Mapping[int, float]
    limit: float | None = None

    @property
    def at_most(self) -> str:
        """Return in words what the widest pass costs."""
        rows = max(self.milliseconds)
        times = self.milliseconds[rows] / self.milliseconds[1]
        return f"{self.name}: a pass of {rows} rows takes {times:.2f} times one's"


def curves_of(documents: Sequence[Document]) -> list[Curve]:
    """Return one curve for each model and dtype: medians over its speed results.

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
    """Return a plot of t(n) / t(1), one line per model, with limits as flat lines."""

    def draw(axes: Axes) -> None:
        for number, curve in enumerate(curves):
            one = curve.milliseconds[1]
            label = f"{curve.name}, t(1) = {one:.3g} ms"
            _line(axes, number, {n: ms / one for n, ms in curve.milliseconds.items()}, label)
            if curve.limit:
                color = CYCLE[number % len(CYCLE)]
                _bound(axes, curve.limit / one, f"{curve.limit / one:.2f}", color, 1.0)
        axes.set_ylabel("time of a pass, t(n) / t(1)")
        _rows_axis(axes)

    return panels([draw], 3.2 + 0.2 * len(curves), ncols=1, handlelength=3.0)


def roofline_svg(document: Document) -> str:
    """Return a plot of a pass's milliseconds: a panel per context, a line per way, the limit."""
    contexts = document["contexts"]
    first, *_, last = [*contexts, *contexts]

    def draw(axes: Axes, context: str) -> None:
        limit = 1e3 * contexts[context]["limit_seconds"]
        for number, (way, figures) in enumerate(contexts[context]["ways"].items()):
            if "milliseconds" in figures:
                times = {int(n): ms for n, ms in figures["milliseconds"].items()}
                _line(axes, number, times, PASS_WAYS[way] if context == first else None)
        _bound(axes, limit, f"{limit:.3g} ms", "#000000", 1.2)
        axes.set_title(f"{int(context):,} tokens of context", fontweight="bold")
        axes.set_ylabel("milliseconds a pass")
        _rows_axis(axes, last=context == last)

    draws = [partial(draw, context=one) for one in contexts]
    return panels(draws, 0.8 + 2.6 * len(contexts), ncols=1, handlelength=3.0)


def _bound(axes: Axes, limit: float, shown: str, color: str, linewidth: float) -> None:
    """Draw the limit of the memory's bandwidth as a flat line."""
    axes.axhline(limit, color=color, linewidth=linewidth)
    beside = {"textcoords": "offset points", "ha": "right", "va": "top", "fontsize": 8.5}
    axes.annotate(f"limit of the bandwidth, {shown}", (max(TICKS), limit), (0, -3), **beside)


def _rows_axis(axes: Axes, *, last: bool = True) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, list(map(str, TICKS)))
    axes.set_ylim(bottom=0.0)
    axes.grid(visible=True, axis="y")
    if last:
        axes.set_xlabel("rows of a pass, n (its draft tokens and one)")


PANELS_ACROSS = 2


def reliability_svg(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the reliability diagrams, a panel per source with logarithmic axes and a dot per bin.

    Exact estimates are on the diagonal. A hollow dot on the lower edge is a bin with an accepted
    share below the axis.
    """
    rows = -(-len(sources) // PANELS_ACROSS)
    decades = [10.0**-power for power in range(_decades(sources), -1, -1)]
    least = decades[0]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(rows, PANELS_ACROSS, sharex=True, sharey=True, squeeze=False).flat
        for axes, (source, figures) in zip(panels, sources.items(), strict=False):
            _panel(axes, figures, least)
            axes.set_title(source, fontweight="bold")
            for axis in (axes.xaxis, axes.yaxis):  # plain numbers: exponents would be tiny
                axis.set_ticks(decades, [f"{one:g}" for one in decades])
        for axes in list(panels)[len(sources) :]:
            axes.set_axis_off()
        figure.supxlabel("estimated chance of acceptance", fontsize=10)
        figure.supylabel("share accepted", fontsize=10)

    return drawn(draw, 0.4 + 2.3 * rows)


def _decades(sources: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many powers of ten below 1 hold all bins' mean estimates."""
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
    told = f"{figures['draft_tokens']:,} draft tokens\nerror {figures['calibration_error']:.4f}"
    axes.text(0.05, 0.95, told, transform=axes.transAxes, va="top", fontsize=8.5)


TOKEN_STAGES = {
    "prefill": Look(BLUE),
    "drafting": Look(VERMILLION, "xxx"),
    "model's passes": Look(SKY, "///"),
    "the rest": Look(GREY, "\\\\\\"),
}
ANSWER_STAGES = {
    "embed": Look(GREEN, "|||"),
    "search": Look(ORANGE, "\\\\\\"),
    "prompt": Look(PURPLE, "---"),
    "prefill": Look(BLUE),
    "draft": Look(VERMILLION, "xxx"),
    "verify": Look(SKY, "///"),
    "rest": Look(GREY, "\\\\\\"),
}
WAY_TITLES = {"bare": "RAG", "langchain": "LangChain", "llama_index": "LlamaIndex"}


def stages_svg(matrix: Matrix) -> str:
    """Return a chart of milliseconds per new token by stage, for each decoder and set."""
    bars = {
        title: {
            name_of(name): stage_milliseconds(one["decoders"][name])
            for name in matrix.decoders
            if name in one["decoders"]
        }
        for title, one in matrix.sets.items()
    }
    return _stacked(bars, TOKEN_STAGES, "milliseconds a new token")


def answer_stages_svg(document: Mapping[str, Any]) -> str:
    """Return a chart of milliseconds per answer by stage, for each way of asking."""
    bars = {
        _way(name): {stage: 1e3 * seconds for stage, seconds in figures["stages"].items()}
        for name, figures in document["decoders"].items()
    }
    return _stacked({"": bars}, ANSWER_STAGES, "milliseconds an answer, mean")


def _way(name: str) -> str:
    for way, title in WAY_TITLES.items():
        if name.startswith(way):
            return title + name.removeprefix(way).replace("_", ", ")
    return name_of(name)


def stage_milliseconds(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a token by stage; the stages sum to its whole time.

    On a GPU the passes are not timed themselves; the time of verification stands for them.
    """
    seconds = figures["seconds"]
    whole = figures["tokens"] / figures["tokens_per_second"]  # seconds of decoding in all runs
    draft = seconds.get("draft", 0.0)
    model = seconds.get("model", seconds.get("verify", whole))
    parts = {
        "prefill": seconds["prefill"],
        "drafting": draft,
        "model's passes": model,
        "the rest": max(0.0, whole - draft - model),
    }
    return {stage: 1e3 * value / figures["tokens"] for stage, value in parts.items()}


def _stacked(bars: Bars, looks: Mapping[str, Look], unit: str) -> str:
    places = list(places_of(bars))
    downs = [down for down, _, _ in places]

    def draw(axes: Axes) -> None:
        left = [0.0] * len(places)
        for stage, look in looks.items():
            widths = [bars[title][name].get(stage, 0.0) for _, title, name in places]
            axes.barh(downs, widths, BAR * 0.86, left, label=stage, **look.of_bars)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(downs, [name for _, _, name in places])
        axes.tick_params(axis="y", length=0)
        for title in bars:
            top = next(down for down, own, _ in places if own == title) - BAR * 0.7
            axes.annotate(title, (0, top), fontweight="bold", annotation_clip=False)
        axes.set_ylim(length_of(places) - GAP / 2, -BAR * 1.8)
        axes.set_xlabel(unit)

    height = 1.2 + 0.17 * (len(looks) // 2) + length_of(places)
    return panels([draw], height, **BARS_LEGEND)


def pictures_of(documents: Documents) -> list[Picture]:
    """Return the pictures of all results, in the order of the report."""
    jobs = (
        *map(_of_matrix, matrices(documents)),
        _cost(documents),
        *(_of_result(stem, one) for stem, one in documents.items()),
    )
    return [picture for job in jobs for picture in _as_far_as_drawn(job)]


def _as_far_as_drawn(job: Iterator[Picture]) -> Iterator[Picture]:
    """Yield pictures until one lacks figures in its results; print a note for that one."""
    try:
        yield from job
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        note(f"a picture is left out: its results do not hold what it shows ({error!r})")


def _of_matrix(matrix: Matrix) -> Iterator[Picture]:
    caption = caption_of_many(list(matrix.sets.values()))
    bars = "; ".join(
        f"{title}: " + ", ".join(_spoken(one["decoders"])) for title, one in matrix.sets.items()
    )
    drawings = [
        ("speed", "how many times as fast as HF greedy, by set", bars, speedup_svg),
        ("lengths", "tokens a pass ends in", "Histograms, one a set.", lengths_svg),
        (
            "stages",
            "where the time of a new token goes",
            "Stacked bars: prefill, drafting, the model's passes and the rest, by decoder and set.",
            stages_svg,
        ),
    ]
    for name, title, alt, draw in drawings:
        if (svg := draw(matrix)) is not None:
            whole = f"{matrix.model}, {matrix.dtype}: {title}"
            yield Picture(f"{matrix.stem}-{name}", "matrix", matrix.stem, whole, alt, caption, svg)


def _spoken(decoders: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, figures in decoders.items():
        if name != BASELINE and "ratio_generate" in figures:
            yield f"{name_of(name)} {figures['ratio_generate']:.2f}"


def _cost(documents: Documents) -> Iterator[Picture]:
    if not (curves := curves_of(list(documents.values()))):
        return
    timed = [one for one in documents.values() if one["kind"] == "speed" and "milliseconds" in one]
    alt = "; ".join(curve.at_most for curve in curves)
    title, caption = "what a pass costs by its rows", caption_of_many(timed)
    yield Picture("pass-cost", "roofline", "", title, alt, caption, cost_svg(curves))


def _of_result(stem: str, one: dict[str, Any]) -> Iterator[Picture]:
    """Yield the pictures of a single result."""
    kind, model = one["kind"], one.get("settings", {}).get("model")

    def picture(title: str, alt: str, svg: str, name: str = stem) -> Picture:
        return Picture(name, kind, stem, title, alt, caption_of(one), svg)

    if kind == "roofline" and one["contexts"]:
        alt = "Milliseconds of a pass by its rows, one line a way of running it."
        yield picture(f"passes against the memory's bandwidth: {model}", alt, roofline_svg(one))
    for title, points in sets_of(one).items() if kind in GRID_AXES and "grid" in one else ():
        if (svg := grid_svg(kind, points)) is not None:
            (_, across), (_, down) = GRID_AXES[kind]
            alt = f"Heat maps: {down} downwards, {across} across. The figures are in its table."
            yield picture(f"{title}: {down} x {across}", alt, svg, f"{stem}-{title}")
    if kind == "rag_speedup":
        alt = "Stacked bars: from embedding the question to the last pass, one a way."
        yield picture("where the time of an answer goes", alt, answer_stages_svg(one))
    if kind == "reliability":
        alt = "Calibration errors: " + ", ".join(
            f"{source} {figures['calibration_error']}" for source, figures in one["sources"].items()
        )
        title = "estimated chances against the share accepted, by source"
        yield picture(title, alt, reliability_svg(one["sources"]))
    if kind == "space_reader":
        alt = "; ".join(
            f"{name}: "
            + ", ".join(
                f"k = {k} {found['tokens_per_pass']:.2f}"
                for k, found in papers(figures["greedy"]).items()
            )
            for name, figures in one["sets"].items()
        )
        title = f"tokens a pass by mask tokens, beside copying: {model}"
        yield picture(title, alt, masks_svg(one["sets"]))
    if kind == "space_curves" and len(one["curve"]) > 1:
        alt = "; ".join(
            f"after {at['step']} steps {at['tokens_per_pass']}"
            for at in (one["curve"][0], one["curve"][-1])
        )
        title = "tokens a pass over the training of an adapter, by mask tokens"
        yield picture(title, alt, curves_svg(one["curve"]), f"{stem}-steps")
