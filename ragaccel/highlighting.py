"""Highlighting: an answer in pieces for display, each copied from a passage or the model's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragaccel.citing import SINGLE, SYMBOL, TOKEN, PassageIndex, Window

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

    What comes out lags by the few words that may still turn out to be the start of a copied span.
    The marked characters are those of ``copied_spans`` over the whole answer; only the choice
    among passages that hold the same words is made with what is known so far.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._index = PassageIndex([passage.text for passage in passages])
        self._window = Window(self._index)
        self._tokens: list[str] = []
        self._num_shown = 0
        self._pending = ""
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
        return _joined([*rest, *self._until(len(self._tokens), 0)])

    def _show(self, tokens: Iterable[str]) -> list[Segment]:
        shown: list[Segment] = []
        for token in tokens:
            self._tokens.append(token)
            self._window.push(token)
            first, last = self._window.run
            shown += self._until(first, 0)
            if self._window.long_enough:
                run = self._window.codes(first, last)
                self._number, _ = self._index.locate(run, [self._number])
                shown += self._until(last, self._number)
        return _joined(shown)

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
