"""Highlighting: an answer in pieces for display, each copied from a passage or the model's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragaccel.citing import (
    SINGLE,
    SYMBOL,
    TOKEN,
    PassageIndex,
    Window,
    may_become_citation,
    next_cited,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ragaccel.citing import CopiedSpan
    from ragaccel.passage import Passage

_CONNECTORS = frozenset("'’.-,")
_ALWAYS_WHOLE = re.compile(rf"[{SINGLE}{SYMBOL}]")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of an answer for display: copied from a numbered passage, or (0) the model's own."""

    text: str
    passage_number: int = 0


def segments(text: str, spans: Sequence[CopiedSpan]) -> list[Segment]:
    """Cut an answer into pieces for display; where spans overlap, the earlier one is shown."""
    pieces: list[Segment] = []
    at = 0
    for span in spans:
        start = max(at, span.start)
        if start < span.end:
            pieces += [
                Segment(text[at:start]),
                Segment(text[start : span.end], span.passage_number),
            ]
            at = span.end
    pieces.append(Segment(text[at:]))
    return [piece for piece in pieces if piece.text]


class Highlighter:
    """Marks copied spans while an answer streams: pieces of text in, segments out.

    What comes out are the segments of the whole answer. It lags by the few words that may still
    turn out to be the start of a copied span, and, where several passages hold the same words, by
    those words, until what follows tells which passage is meant.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._index = PassageIndex([passage.text for passage in passages])
        self._window = Window(self._index)
        self._tokens: list[str] = []
        self._num_shown = 0
        self._pending = ""
        self._ended: list[tuple[int, int]] = []  # runs whose passage is not known yet
        self._number = 0

    def feed(self, piece: str) -> list[Segment]:
        """Take the next piece of the answer; return what can be shown by now."""
        self._pending += piece
        tokens = TOKEN.findall(self._pending)
        whole = _num_whole(tokens)
        self._pending = "".join(tokens[whole:])
        return self._show(tokens[:whole])

    def finish(self) -> list[Segment]:
        """Return what was held back, once the answer has ended."""
        rest = self._show(TOKEN.findall(self._pending))
        self._pending = ""
        self._ended += self._window.ended()
        return _joined([*rest, *self._settle(last=True), *self._until(len(self._tokens), 0)])

    def _show(self, tokens: Iterable[str]) -> list[Segment]:
        shown: list[Segment] = []
        for token in tokens:
            self._tokens.append(token)
            self._ended += self._window.push(token)
            shown += self._settle()
            if not self._ended:
                shown += self._running()
        return _joined(shown)

    def _settle(self, *, last: bool = False) -> list[Segment]:
        """Show the runs that have ended, as far as it is certain which passages they are from."""
        shown: list[Segment] = []
        while self._ended:
            first, end = self._ended[0]
            behind = "".join(self._tokens[end:])
            run = self._window.codes(first, end)
            if not last and may_become_citation(behind) and len(self._index.holders(run)) > 1:
                break
            self._number, _ = self._index.locate(run, [*next_cited(behind), self._number])
            shown += [*self._until(first, 0), *self._until(end, self._number)]
            self._ended.pop(0)
        return shown

    def _running(self) -> list[Segment]:
        """Show what comes before the run that goes on, and that too if only one passage has it."""
        first, end = self._window.run
        shown = self._until(first, 0)
        if self._window.long_enough:
            holders = self._index.holders(self._window.codes(first, end))
            if len(holders) == 1:
                self._number = holders[0]
                shown += self._until(end, self._number)
        return shown

    def _until(self, end: int, number: int) -> list[Segment]:
        text = "".join(self._tokens[self._num_shown : end])
        self._num_shown = max(self._num_shown, end)
        return [Segment(text, number)] if text else []


def _num_whole(tokens: Sequence[str]) -> int:
    """How many of the tokens cannot grow any more, whatever text follows."""
    count = len(tokens)
    if count and tokens[-1] in _CONNECTORS and count > 1 and not _ends_alone(tokens[-2]):
        return count - 2
    return count if count and _ALWAYS_WHOLE.fullmatch(tokens[-1]) else max(0, count - 1)


def _ends_alone(token: str) -> bool:
    return token.isspace() or _ALWAYS_WHOLE.fullmatch(token) is not None


def _joined(pieces: Iterable[Segment]) -> list[Segment]:
    return list(_merge(pieces))


def _merge(pieces: Iterable[Segment]) -> Iterator[Segment]:
    """Neighbours of one passage become one segment."""
    last: Segment | None = None
    for piece in pieces:
        if last is not None and last.passage_number == piece.passage_number:
            last = Segment(last.text + piece.text, last.passage_number)
        else:
            if last is not None:
                yield last
            last = piece
    if last is not None:
        yield last
