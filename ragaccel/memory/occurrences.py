"""Occurrences: which texts stand in another one, wholly or in part, whitespace aside."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ragaccel.memory.anchors import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    Places = Sequence[tuple[int, int]]  # of the searched text, and of the one looked for

LEAST_COMMON = 96  # characters, a run of whitespace taken as one
_BOILERPLATE = 4  # texts that may have a part in common before it tells nothing
_MOST_ALIGNMENTS = 8  # of one text that are compared character by character
_MOST_COMPARED = 2_000  # texts that are compared character by character
_DISTINCT = 8  # characters that few have: two texts rarely go on alike for so long by chance
_STEP = 64


def squeeze(text: str) -> str:
    """A text without its whitespace: how it was wrapped and indented does not count."""
    return "".join(text.split())


class SearchedText:
    """The text in which others are looked for: squeezed, and where its characters were."""

    def __init__(self, text: str) -> None:
        self.text, self.squeezed = text, squeeze(text)

    @cached_property
    def offsets(self) -> NDArray[np.intp]:
        """Where each character of ``squeezed`` stands in ``text``."""
        codes = np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), "<u4")
        return np.flatnonzero(~_WHITESPACE[np.minimum(codes, len(_WHITESPACE) - 1)])

    def size(self, start: int, end: int) -> int:
        """How many characters a part of ``squeezed`` was, a run of whitespace taken as one."""
        gaps = np.count_nonzero(np.diff(self.offsets[start:end]) > 1)
        return end - start + int(gaps)

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Where a part of ``squeezed`` begins and ends in ``text``."""
        return int(self.offsets[start]), int(self.offsets[end - 1]) + 1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A part [start, end) of a squeezed text, which is the text of this number or a part of it."""

    number: int
    start: int
    end: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A squeezed text that may stand in another: the places at which both have an anchor.

    Of equally good ones the one with the higher ``rank`` is chosen.
    """

    number: int
    text: str
    places: Places
    rank: int


def find_occurrences(searched: SearchedText, candidates: Iterable[Candidate]) -> list[Occurrence]:
    """Find the candidates that really stand in a text, in the order in which they do.

    Those that do wholly come first. A part must be ``LEAST_COMMON`` characters long, must not lie
    in what others cover, and be had by few texts or be the better half of its own: what documents
    have in common says nothing about which of them is here.
    """
    covered = bytearray(len(searched.squeezed))
    found: list[Occurrence] = []
    others: list[Candidate] = []
    for candidate in candidates:
        starts = _whole_at(searched.squeezed, candidate)
        for start in starts:
            _cover(covered, start, start + len(candidate.text))
        if starts:
            end = starts[0] + len(candidate.text)
            found.append(Occurrence(candidate.number, starts[0], end, True))
        else:
            others.append(candidate)
    found += _partial(searched, others, covered)
    return sorted(found, key=lambda one: (one.start, one.end))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a text has in common with the searched one: (start, end) in the latter."""

    candidate: Candidate
    spans: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.spans)


def _whole_at(text: str, candidate: Candidate) -> list[int]:
    starts = {at - of_text for at, of_text in candidate.places}
    return sorted(
        start for start in starts if start >= 0 and text.startswith(candidate.text, start)
    )


def _partial(
    searched: SearchedText, candidates: Iterable[Candidate], covered: bytearray
) -> list[Occurrence]:
    compared = _compare(searched, candidates, covered)
    sharing = np.zeros(len(covered) + 1, np.int32)
    for parts in compared:
        for start, end in parts.spans:
            sharing[start] += 1
            sharing[end] -= 1
    common = np.cumsum(sharing) > _BOILERPLATE
    found = []
    for parts in sorted(compared, key=lambda one: (one.size, one.candidate.rank), reverse=True):
        start, end = max(parts.spans, key=lambda span: covered.count(0, *span))
        if covered.count(0, start, end) < ANCHOR:
            continue
        own = end - start - int(np.count_nonzero(common[start:end]))
        if own < _DISTINCT and 2 * parts.size < len(parts.candidate.text):
            continue
        found.append(Occurrence(parts.candidate.number, start, end, False))
        for span in parts.spans:
            _cover(covered, *span)
    return found


def _compare(
    searched: SearchedText, candidates: Iterable[Candidate], covered: bytearray
) -> list[_Parts]:
    left: list[tuple[Candidate, list[tuple[int, int]]]] = []
    for candidate in candidates:
        places = [(at, of) for at, of in candidate.places if not covered[at]]
        if places:
            left.append((candidate, places))
    left.sort(key=lambda item: (len(item[1]), item[0].rank), reverse=True)
    compared = []
    for candidate, places in left[:_MOST_COMPARED]:
        spans = tuple(_common_spans(searched, candidate.text, places))
        if spans:
            compared.append(_Parts(candidate, spans))
    return compared


def _common_spans(searched: SearchedText, text: str, places: Places) -> Iterable[tuple[int, int]]:
    """The parts of a text that stand in the searched one, by its best aligned places."""
    by_shift: dict[int, list[int]] = {}
    for at, of_text in places:
        by_shift.setdefault(at - of_text, []).append(at)
    best = Counter({shift: len(ats) for shift, ats in by_shift.items()})
    for shift, _ in best.most_common(_MOST_ALIGNMENTS):
        end = -1
        for at in sorted(by_shift[shift]):
            if at < end:
                continue
            start, end = _extended(searched.squeezed, text, at, at - shift)
            if searched.size(start, end) >= LEAST_COMMON:
                yield start, end


def _extended(a: str, b: str, i: int, j: int) -> tuple[int, int]:
    """Where in ``a`` the part begins and ends that both have in common round a place of each."""
    before, behind = min(i, j), min(len(a) - i, len(b) - j)
    back = _longest(before, lambda k, more: a.startswith(b[j - more : j - k], i - more))
    ahead = _longest(behind, lambda k, more: a.startswith(b[j + k : j + more], i + k))
    return i - back, i + ahead


def _longest(most: int, agree: Callable[[int, int], bool]) -> int:
    """How far two texts agree, which are compared by ever larger pieces and then smaller ones."""
    same, step, grows = 0, _STEP, True
    while step:
        more = same + step
        if more <= most and agree(same, more):
            same = more
        else:
            grows = False
        step = step * 2 if grows else step // 2
    return same


def _cover(covered: bytearray, start: int, end: int) -> None:
    covered[start:end] = b"\1" * (end - start)


_WHITESPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # the last: none beyond
