"""Occurrences: which texts stand in another one, wholly or in part, whitespace aside."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ragaccel.memory.anchors import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ragaccel.memory.anchors import Alignment

LEAST_COMMON = 96  # characters, a run of whitespace taken as one
_LEAST_SQUEEZED = LEAST_COMMON // 2  # if every second character was whitespace
_BOILERPLATE = 4  # texts that may have a part in common before it tells nothing
_VERSIONS = 32  # texts that may have most of theirs in common
_MOST_COMPARED = 1_000  # alignments that are compared character by character
_MOST_ALIGNMENTS = 8  # of them of one text
_REGION = 64
_MOST_OF_REGION = 64  # of them that share so many characters: enough to know what many have
_DISTINCT = 8  # characters that few have: two texts rarely go on alike for so long by chance
_STEP = 64
_WHITESPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # there is none beyond


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
        if not _LEAST_SQUEEZED <= end - start < LEAST_COMMON:
            return end - start  # no need to look: it is enough, or never will be
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


class Candidate(Protocol):
    """A text that may stand in another; of equally good ones the one registered last is chosen."""

    @property
    def squeezed(self) -> str:
        """The text without its whitespace."""

    @property
    def registered(self) -> int:
        """The higher, the later it was."""


def find_occurrences(
    searched: SearchedText, candidates: Mapping[int, Candidate], alignments: Sequence[Alignment]
) -> list[Occurrence]:
    """Find the candidates that really stand in a text, in the order in which they do.

    Those that do wholly come first. A part must be ``LEAST_COMMON`` characters long, must not lie
    in what others cover, and be had by few texts or, of not so few, be the better half of its own:
    what documents have in common says nothing about which of them is here.
    """
    text = searched.squeezed
    covered = bytearray(len(text))
    wholly: dict[int, Occurrence] = {}
    others: list[tuple[float, int, Alignment]] = []
    for one in alignments:
        own = candidates[one.number].squeezed
        end = one.shift + len(own)
        if one.shift >= 0 and text.startswith(own, one.shift):
            _cover(covered, one.shift, end)
            wholly.setdefault(one.number, Occurrence(one.number, one.shift, end, True))
        elif len(one.places) > 1 or _goes_on(text, own, one.places[0], one.places[0] - one.shift):
            in_common = min(end, len(text)) - max(one.shift, 0)  # at most
            others.append((-one.rarity, -in_common, one))
    left = _open([one for *_, one in sorted(others) if one.number not in wholly], covered)
    parts = _common_parts(searched, candidates, left)
    found = [*wholly.values(), *_choose(parts, candidates, covered)]
    return sorted(found, key=lambda one: (one.start, one.end))


def _open(alignments: Iterable[Alignment], covered: bytearray) -> list[Alignment]:
    """Those with an anchor that nothing covers, of each text and each region the first few."""
    left: list[Alignment] = []
    of_text: Counter[int] = Counter()
    of_region: Counter[int] = Counter()
    for one in alignments:
        places = [at for at in one.places if not covered[at]]
        regions = {at // _REGION for at in places}
        if of_text[one.number] < _MOST_ALIGNMENTS and any(
            of_region[region] < _MOST_OF_REGION for region in regions
        ):
            of_text[one.number] += 1
            of_region.update(regions)
            left.append(one._replace(places=places))
            if len(left) == _MOST_COMPARED:
                break
    return left


def _common_parts(
    searched: SearchedText, candidates: Mapping[int, Candidate], alignments: Sequence[Alignment]
) -> dict[int, list[_Part]]:
    """By number, the parts of texts that stand in the searched one and are long enough."""
    parts: dict[int, list[_Part]] = {}
    for one in alignments:
        text, known = candidates[one.number].squeezed, parts.get(one.number, [])
        for at in one.places:
            if any(part.start <= at < part.end for part in known):
                continue
            part = _Part(*_extended(searched.squeezed, text, at, at - one.shift), one.shift)
            if searched.size(part.start, part.end) >= LEAST_COMMON:
                known = parts.setdefault(one.number, known)
                known.append(part)
    return parts


class _Part(NamedTuple):
    """A part [start, end) of the searched text, which a text has ``shift`` characters before."""

    start: int
    end: int
    shift: int


def _size(parts: Sequence[_Part]) -> int:
    """How much of a text some parts are, what several have in common counted once."""
    size = reach = 0
    for start, end in sorted((part.start - part.shift, part.end - part.shift) for part in parts):
        size += max(0, end - max(start, reach))
        reach = max(reach, end)
    return size


def _goes_on(a: str, b: str, i: int, j: int) -> bool:
    """Whether an anchor that two texts have in common may be in a part that is long enough."""
    more = (_LEAST_SQUEEZED - ANCHOR) // 2  # on one side of it at least
    ahead = b[j + ANCHOR : j + ANCHOR + more]
    if len(ahead) == more and a.startswith(ahead, i + ANCHOR):
        return True
    return min(i, j) >= more and a.startswith(b[j - more : j], i - more)


def _extended(a: str, b: str, i: int, j: int) -> tuple[int, int]:
    """Where in ``a`` the part begins and ends that both have in common round a place of each."""
    return i - _agreeing(a, b, i, j, ahead=False), i + _agreeing(a, b, i, j, ahead=True)


def _agreeing(a: str, b: str, i: int, j: int, *, ahead: bool) -> int:
    """How many characters two texts have in common after a place of each, or before it."""
    most = min(len(a) - i, len(b) - j) if ahead else min(i, j)
    same, step, grows = 0, _STEP, True
    while step:
        more = same + step
        first = same if ahead else -more
        if more <= most and a.startswith(b[j + first : j + first + step], i + first):
            same = more
        else:
            grows = False
        step = step * 2 if grows else step // 2
    return same


def _choose(
    parts: Mapping[int, Sequence[_Part]], candidates: Mapping[int, Candidate], covered: bytearray
) -> Iterator[Occurrence]:
    """Of the texts that are there in part, those that have most there, and more than others."""
    changes = np.zeros(len(covered) + 1, np.int32)
    for start, end, _ in chain.from_iterable(parts.values()):
        changes[start] += 1
        changes[end] -= 1
    sharing = np.cumsum(changes)
    sizes = {number: _size(own) for number, own in parts.items()}
    for number in sorted(parts, key=lambda n: (sizes[n], candidates[n].registered), reverse=True):
        start, end, _ = max(parts[number], key=lambda part: covered.count(0, *part[:2]))
        if covered.count(0, start, end) < ANCHOR:
            continue
        is_most = 2 * sizes[number] >= len(candidates[number].squeezed)
        common = sharing[start:end] > (_VERSIONS if is_most else _BOILERPLATE)
        if end - start - _longest_run(common) < _DISTINCT:
            continue
        yield Occurrence(number, start, end, False)
        for part in parts[number]:
            _cover(covered, part.start, part.end)


def _longest_run(flags: NDArray[np.bool_]) -> int:
    """How many neighbouring flags are set, at most."""
    return max(map(len, flags.tobytes().split(b"\0"))) if flags.any() else 0


def _cover(covered: bytearray, start: int, end: int) -> None:
    covered[start:end] = b"\1" * (end - start)
