"""Marking: an answer on the terminal, every copied span shown with the passage it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.cli.flow import Flow
from ragaccel.cli.terminal import passage_style, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ragaccel.cli.terminal import Terminal
    from ragaccel.highlighting import Segment

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_BEFORE_CITATION = " .,;:!?\"'”’)»"


def number_mark(terminal: Terminal, number: int) -> str:
    """A passage's number as it stands behind a copied span."""
    return str(number).translate(_SUPERSCRIPTS) if terminal.unicode else f"[{number}]"


class MarkedAnswer:
    """Writes the segments of an answer as they come, copied spans marked.

    A copied span stands in «…» (``<<…>>`` where only ASCII is shown) and, on a colour terminal,
    has its passage's colour. Behind it comes the passage's number, unless the answer itself goes
    on with it: ``«The hut sleeps 14.» [2]`` needs no second 2.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._flow = Flow(terminal.write, terminal.wrap_width)
        self._ended = 0  # the passage of a span that has just ended: its number may be due
        self._between = ""  # what came since, as long as it may lead to a citation

    def add(self, segments: Iterable[Segment]) -> None:
        """Write the next segments; neighbours of one passage are one span."""
        for segment in segments:
            number = segment.passage_number
            if not number:
                self._own_words(segment.text)
                continue
            if number != self._ended or self._between:
                self._settle(cited=False)
                self._put("«" if self._terminal.unicode else "<<", number)
            self._put(segment.text, number)
            self._ended = number

    def finish(self) -> None:
        """End the last span and the line."""
        self._settle(cited=False)
        self._flow.finish()
        self._terminal.write("\n")

    def _own_words(self, text: str) -> None:
        self._between += text
        if not self._ended:
            self._settle(cited=False)
            return
        follows = self._between.lstrip(_BEFORE_CITATION)
        citation = f"[{self._ended}]"
        if not citation.startswith(follows[: len(citation)]):
            self._settle(cited=False)
        elif len(follows) >= len(citation):
            self._settle(cited=True)

    def _settle(self, *, cited: bool) -> None:
        """End the span before, with its number where the answer does not give it."""
        if self._ended:
            self._put("»" if self._terminal.unicode else ">>", self._ended)
            if not cited:
                self._put(number_mark(self._terminal, self._ended), self._ended)
        self._put(self._between, 0)
        self._ended, self._between = 0, ""

    def _put(self, text: str, number: int) -> None:
        style = passage_style(number) if number and self._terminal.colored else ""
        if text:
            self._flow.feed(printable(text), style)
