"""Occurrences: which texts stand in another one, wholly or in part, whitespace aside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ragaccel.memory.anchors import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from numpy.typing import NDArray

    from ragaccel.memory.anchors import Alignments

LEAST_COMMON = 96  # characters, a run of whitespace taken as one
_LEAST_SQUEEZED = LEAST_COMMON // 2  # if every second character was whitespace
_BOILERPLATE = 4  # texts that may have a part in common before it tells nothing
_VERSIONS = 32  # texts that may have most of theirs in common
_MOST_COMPARED = 1_000  # alignments that are compared character by character
_MOST_PARTS = 8  # of one text
_ENOUGH = 40  # texts that have a part: no more are needed to know that many do
_DISTINCT = 8  # characters that few have: two texts rarely go on alike for so long by chance
_REACH = 256  # characters round a place that are compared at first
_WHITESPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # there is none beyond


def squeeze(text: str) -> str:
    """A text without its whitespace: how it was wrapped and indented does not count."""
    return "".join(text.split())


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


class SearchedText:
    """The text in which others are looked for: squeezed, and where its characters were."""

    def __init__(self, text: str) -> None:
        self.text, self.squeezed = text, squeeze(text)

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """The characters of ``squeezed`` as numbers."""
        return _codes(self.squeezed)

    @cached_property
    def offsets(self) -> NDArray[np.intp]:
        """Where each character of ``squeezed`` stands in ``text``."""
        codes = _codes(self.text)
        return np.flatnonzero(~_WHITESPACE[np.minimum(codes, len(_WHITESPACE) - 1)])

    def size(self, start: int, end: int) -> int:
        """How many characters a part of ``squeezed`` was, a run of whitespace taken as one."""
        if end - start < _LEAST_SQUEEZED:
            return end - start  # no need to look: it never will be enough
        return end - start + int(self._gaps[end - 1] - self._gaps[start])

    @cached_property
    def _gaps(self) -> NDArray[np.intp]:
        """How often whitespace stood before each character of ``squeezed`` but the first."""
        return np.append(0, np.cumsum(self.offsets[1:] - self.offsets[:-1] > 1))

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Where a part of ``squeezed`` begins and ends in ``text``."""
        return int(self.offsets[start]), int(self.offsets[end - 1]) + 1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A part [start, end) of a squeezed text, which is the text of this number or a part of it.

    That text's own places are ``shift`` characters before those of the searched one.
    """

    number: int
    start: int
    end: int
    whole: bool
    shift: int


class Candidate(Protocol):
    """A text that may stand in another; of equally good ones the one registered last is chosen."""

    @property
    def squeezed(self) -> str:
        """The text without its whitespace."""

    @property
    def registered(self) -> int:
        """The higher, the later it was."""


def find_occurrences(
    searched: SearchedText, candidates: Mapping[int, Candidate], alignments: Alignments
) -> list[Occurrence]:
    """Find the candidates that really stand in a text, in the order in which they do.

    Those that do wholly come first. A part must be ``LEAST_COMMON`` characters long, must not lie
    in what others cover, and be had by few texts or, of not so few, be the better half of its own:
    what documents have in common says nothing about which of them is here. Of a text that is there
    in several parts each is told. Alignments of texts that are no candidates are passed over.
    """
    covered = bytearray(len(searched.squeezed))
    wholly = _wholly(searched.squeezed, candidates, alignments, covered)
    left = _open(alignments, candidates.keys() - wholly.keys(), candidates, covered)
    parts = _common_parts(searched, candidates, left)
    found = [*wholly.values(), *_choose(parts, candidates, covered)]
    return sorted(found, key=lambda one: (one.start, one.end))


def _wholly(
    text: str, candidates: Mapping[int, Candidate], alignments: Alignments, covered: bytearray
) -> dict[int, Occurrence]:
    """By number, the texts that stand in a text wholly, where they do first; all are covered."""
    wholly: dict[int, Occurrence] = {}
    texts = {number: one.squeezed for number, one in candidates.items()}
    for number, at in zip(alignments.number.tolist(), alignments.shift.tolist(), strict=True):
        own = texts.get(number)
        if at >= 0 and own and text.startswith(own, at):
            _cover(covered, at, at + len(own))
            if number not in wholly or at < wholly[number].start:
                wholly[number] = Occurrence(number, at, at + len(own), True, at)
    return wholly


def _open(
    alignments: Alignments,
    numbers: Set[int],
    candidates: Mapping[int, Candidate],
    covered: bytearray,
) -> Iterator[tuple[int, int, list[int]]]:
    """The number, the shift and the places that nothing covers of each alignment that has some.

    The rarest first, of equally rare ones those that may have most in common.
    """
    is_open = np.frombuffer(covered, np.uint8)[alignments.places] == 0
    before = np.append(0, np.cumsum(is_open))
    begin, end = before[alignments.begin], before[alignments.end]
    left = np.flatnonzero(end > begin)
    number, shift = alignments.number[left], alignments.shift[left]
    size = np.array(
        [len(candidates[n].squeezed) if n in numbers else 0 for n in number.tolist()], np.intp
    )
    in_common = np.minimum(shift + size, len(covered)) - np.maximum(shift, 0)
    best = np.lexsort((-in_common, -alignments.rarity[left]))
    best = best[size[best] > 0]
    places = alignments.places[is_open].tolist()
    columns = (number[best], shift[best], begin[left[best]], end[left[best]])
    for one, moved, first, last in zip(*(c.tolist() for c in columns), strict=True):
        yield one, moved, places[first:last]


def _common_parts(
    searched: SearchedText,
    candidates: Mapping[int, Candidate],
    alignments: Iterable[tuple[int, int, list[int]]],
) -> dict[int, list[_Part]]:
    """By number, the parts of texts that stand in the searched one and are long enough."""
    parts: dict[int, list[_Part]] = {}
    sharing = np.zeros(len(searched.squeezed), np.uint16)
    shared = sharing.data  # quicker to read one by one
    common: set[tuple[int, int]] = set()  # anchors of texts that enough others have there
    compared = 0
    for number, shift, places in alignments:
        first = min(places)
        if shared[first] > _ENOUGH and shared[max(places)] > _ENOUGH:
            common.add((number, first - shift))
            continue
        known = parts.get(number, [])
        if (number, first - shift) in common or len(known) >= _MOST_PARTS:
            continue
        compared += 1
        own, end = candidates[number].squeezed, 0
        for at in sorted(places):
            if at < end or any(part.start <= at < part.end for part in known):
                continue
            start, end = _extended(searched.codes, own, at, shift)
            if searched.size(start, end) >= LEAST_COMMON:
                known = parts.setdefault(number, known)
                known.append(_Part(start, end, shift))
                sharing[start:end] += 1
        if compared == _MOST_COMPARED:
            break
    return parts


class _Part(NamedTuple):
    """A part [start, end) of the searched text, which a text has ``shift`` characters before."""

    start: int
    end: int
    shift: int


def _size(parts: Sequence[_Part]) -> int:
    """How much of a text some parts are, what several have in common counted once."""
    if len(parts) == 1:
        return parts[0].end - parts[0].start
    size = reach = 0
    for start, end in sorted((part.start - part.shift, part.end - part.shift) for part in parts):
        size += max(0, end - max(start, reach))
        reach = max(reach, end)
    return size


def _extended(codes: NDArray[np.uint32], own: str, at: int, shift: int) -> tuple[int, int]:
    """Where the part begins and ends that a text has in common with another round a place."""
    reach = _REACH
    while True:
        begin, end = max(at - reach, shift, 0), min(at + reach, shift + len(own), len(codes))
        differs = (codes[begin:end] != _codes(own[begin - shift : end - shift])).tobytes()
        first = differs.rfind(1, 0, at - begin) + 1
        last = differs.find(1, at - begin) % (len(differs) + 1)  # -1 is all that was compared
        if (first or at - begin < reach) and (last < len(differs) or end - at < reach):
            return begin + first, begin + last
        reach *= 8


def _choose(
    parts: Mapping[int, Sequence[_Part]], candidates: Mapping[int, Candidate], covered: bytearray
) -> Iterator[Occurrence]:
    """Of the texts that are there in part, those that have most there, and more than others."""
    changes = np.zeros(len(covered) + 1, np.int32)
    for start, end, _ in chain.from_iterable(parts.values()):
        changes[start] += 1
        changes[end] -= 1
    sharing = np.cumsum(changes)
    boilerplate, versions = ((sharing > most).tobytes() for most in (_BOILERPLATE, _VERSIONS))
    sizes = {number: _size(own) for number, own in parts.items()}
    for number in sorted(parts, key=lambda n: (sizes[n], candidates[n].registered), reverse=True):
        is_most = 2 * sizes[number] >= len(candidates[number].squeezed)
        common = versions if is_most else boilerplate
        told: list[tuple[int, int]] = []
        for part in sorted(parts[number], key=lambda part: -covered.count(0, *part[:2])):
            start, end, shift = part
            is_new = not any(a <= start - shift and end - shift <= b for a, b in told)
            if is_new and _tells(start, end, covered, common):
                told.append((start - shift, end - shift))
                common = boilerplate  # that it is a version says nothing about its other parts
                yield Occurrence(number, start, end, False, shift)
                _cover(covered, start, end)
            elif not told:  # its largest part says nothing
                break
        for part in parts[number] if told else ():
            _cover(covered, part.start, part.end)


def _tells(start: int, end: int, covered: bytearray, common: bytes) -> bool:
    """Whether a part is something that others neither cover nor have in common."""
    is_open = covered.count(0, start, end) >= ANCHOR
    return is_open and end - start - _longest_run(common[start:end]) >= _DISTINCT


def _longest_run(flags: bytes) -> int:
    """How many neighbouring flags are set, at most."""
    return max(map(len, flags.split(b"\0"))) if 1 in flags else 0


def _cover(covered: bytearray, start: int, end: int) -> None:
    covered[start:end] = b"\1" * (end - start)
