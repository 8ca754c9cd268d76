"""Texts to copy from: references and running text in one list of tokens."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ragaccel.decoding.tree import Origin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel.decoding.request import Reference
    from ragaccel.decoding.session import Context

BOUNDARY = -1  # stands before every text; no token equals it, so no match crosses it
PADDING = 32  # boundaries in front, so that this many tokens can be read before any place


class Match(NamedTuple):
    """An earlier occurrence of the last ``length`` tokens; the token at ``place`` follows it."""

    length: int
    place: int


class Texts:
    """References, then the running text (prompt and output), which grows with the context.

    A *place* is an index into ``token_ids``; the running text starts at ``text_start``.
    """

    def __init__(self, context: Context, references: Sequence[Reference]) -> None:
        self._context = context
        self.token_ids: list[int] = [BOUNDARY] * PADDING
        self._starts: list[int] = []
        self._passage_ids: list[str] = []
        for reference in references:
            self._begin(reference.passage_id)
            self.token_ids += reference.token_ids
        self._begin("")
        self.text_start = len(self.token_ids)
        self.output_start = self.text_start + context.num_prompt
        self.token_ids += context.token_ids[: context.num_prompt]

    def references(self) -> Iterator[tuple[int, int]]:
        """Go through the references: the place of each one's first token and of its end."""
        for start, after in pairwise(self._starts):
            yield start, after - 1

    def grow(self) -> int:
        """Append what the context has gained; return the place where that begins."""
        end = len(self.token_ids)
        self.token_ids += self._context.token_ids[end - self.text_start :]
        return end

    def following(self, place: int, count: int) -> list[int]:
        """Read at most ``count`` tokens from a place on, to the end of its text."""
        text = bisect_right(self._starts, place)
        if text < len(self._starts):
            count = min(count, self._starts[text] - 1 - place)
        return self.token_ids[place : place + count]

    def origins(self, match: Match, count: int) -> list[tuple[Origin, ...]]:
        """Say of each of the ``count`` tokens that follow a match where it was copied from."""
        text = bisect_right(self._starts, match.place) - 1
        offset = match.place - self._starts[text]
        source = "reference" if match.place < self.text_start else "prompt"
        if match.place >= self.output_start:
            source = "output"
        passage_id = self._passage_ids[text]
        return [(Origin(source, match.length + i, passage_id, offset + i),) for i in range(count)]

    def _begin(self, passage_id: str) -> None:
        self.token_ids.append(BOUNDARY)
        self._starts.append(len(self.token_ids))
        self._passage_ids.append(passage_id)
