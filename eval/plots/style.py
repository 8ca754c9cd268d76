"""Style: how all plots look, and how they become files that do not change unless their data do.

They are as wide as a phone, so that their letters stay legible on one. Colours are Okabe and Ito's,
told apart by colour-blind readers; hatches and markers tell the same in grey.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable

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
    "svg.fonttype": "none",  # letters, which a page can search and read aloud; not outlines
    "svg.hashsalt": "ragaccel",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How one decoder's, or one stage's, bars are filled."""

    colour: str
    hatch: str = ""

    @property
    def of_bars(self) -> dict[str, Any]:
        """The arguments of a bar."""
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
    """The look of each decoder; those without one of their own take what is left."""
    taken = [LOOKS[name] for name in names if name in LOOKS]
    others = cycle([look for look in OTHERS if look not in taken] or [Look(GREY)])
    return {name: LOOKS.get(name) or next(others) for name in names}


def drawn(draw: Callable[[Figure], None], height: float) -> str:
    """Draw on a figure of our width, in inches: as SVG, the same for the same data."""
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever a reader's own matplotlibrc says
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
