"""Pictures: what a plot is once drawn, whoever shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot: its file's stem, the kind and stem of the result it shows, and the drawing as SVG.

    ``alt`` is for who cannot see it; ``caption`` tells hardware, commit and command, in Markdown.
    """

    stem: str
    kind: str
    shows: str
    title: str
    alt: str
    caption: str
    svg: str

    @property
    def file(self) -> str:
        """The name of its file: one that every system takes, and a link without escapes."""
        return re.sub(r"[^\w.]+", "-", self.stem).strip("-") + ".svg"
