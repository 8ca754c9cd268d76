"""Find the passages that occur in a prompt, by fingerprints (winnowing) and alignment.

Winnowing: Schleimer, Wilkerson, Aiken, "Local Algorithms for Document Fingerprinting", 2003. A text
is indexed by a few of its k-grams; a prompt is looked up by all of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]
    Positions = NDArray[np.intp]

KGRAM_LENGTH = 20  # characters of a k-gram
_WINDOW = 48  # a text has a fingerprint in every run of this many k-grams
_MAX_TEXTS = 16  # maximum number of texts indexed by the same fingerprint
# A pair is a position in the searched text and one in an indexed text with the same fingerprint.
_MAX_PAIRS = 64  # of one fingerprint
_RARE_PAIRS = 8  # a fingerprint with at most this many pairs is rare
_MAX_RARE_PAIRS = 30_000  # of all rare fingerprints together
# Pairs of all common fingerprints: one for 8 characters, within these bounds.
_MIN_COMMON_PAIRS, _MAX_COMMON_PAIRS = 500, 6_000
_MAX_ALIGNMENTS = 4_000
_MAX_COMMON_ALIGNMENTS = 1_000
_REGION = 256  # characters of the searched text
_MAX_PER_REGION = 48  # common alignments that begin in a region; more would not be distinctive
_RARE = 0.5  # lowest rarity of an alignment that is not common
# A position is 8 bytes: the text's number, 6 bits each for the context before and after, the offset
_POSITION_BYTES = 8
_BEFORE, _AFTER = 26, 20
_TAG = 63
_TAGS = np.array([_TAG << _BEFORE, _TAG << _AFTER])
_TAG_MASK, _OFFSET_MASK = int(_TAGS.sum()), (1 << _AFTER) - 1
_MARGIN = 14  # characters that a long enough part has on at least one side of its fingerprint
FINGERPRINT_BYTES = 150  # measured memory of a fingerprint and its index entry
_KEY_BITS = 60  # a Python integer of this size takes 32 bytes
_FACTORS = [np.uint64(pow(0x9E3779B97F4A7C15, 2**i, 2**64)) for i in range(4)]
_MIXER = np.uint64(0xD6E8FEB86659FD93)


def kgram_keys(text: str, seed: int) -> Keys:
    """Return the keys [characters - KGRAM_LENGTH + 1] of a text's k-grams, one for every offset.

    A key is a hashed polynomial of the characters; with one seed, equal k-grams have equal keys.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    if len(codes) < KGRAM_LENGTH:
        return codes[:0]
    two = codes[:-1] * _FACTORS[0] + codes[1:]
    four = two[:-2] * _FACTORS[1] + two[2:]
    eight = four[:-4] * _FACTORS[2] + four[4:]
    keys: Keys = eight[:-8] * _FACTORS[3] + eight[8:]
    keys = keys[:-4] * _FACTORS[2] + four[16:]
    keys += np.uint64(seed)
    keys ^= keys >> np.uint64(32)
    keys *= _MIXER
    keys >>= np.uint64(64 - _KEY_BITS)
    return keys


class CandidateAlignments(NamedTuple):
    """Possible alignments of indexed texts with the searched text, rarest first, as columns.

    Offset i of text ``number`` is aligned with offset i + ``shift`` of the searched text, because
    they share fingerprints at ``positions[begin:end]`` of the searched text. ``rarity`` is higher
    the fewer texts and positions share those fingerprints.
    """

    number: Positions
    shift: Positions
    begin: Positions
    end: Positions
    rarity: NDArray[np.float64]
    positions: Positions


class FingerprintIndex:
    """An index from fingerprints to the texts and offsets that they come from.

    Any ``_WINDOW + KGRAM_LENGTH - 1`` characters of a text hold a fingerprint. Of the k-grams of a
    window, the one that the fewest texts use is chosen: so the distinctive part of a text becomes
    its fingerprint, and equal texts have fingerprints at different offsets. Not thread-safe.
    """

    def __init__(self, num_counters: int) -> None:
        bits = max(12, num_counters.bit_length())
        self._counters = bytearray(1 << bits)  # uses of fingerprints, by the first bits of the key
        self._counted = np.frombuffer(self._counters, np.uint8)
        self._shift = _KEY_BITS - bits
        self._positions: dict[int, bytes] = {}  # bytes, so that garbage collection skips them

    @property
    def num_bytes(self) -> int:
        """Return the size of the counters; each fingerprint adds ``FINGERPRINT_BYTES``."""
        return len(self._counters)

    def add(self, number: int, keys: Keys) -> tuple[int, ...]:
        """Index a new text by its k-grams; return its fingerprints, which ``remove`` takes."""
        used = self._counted[keys >> np.uint64(self._shift)]
        chosen = _select_fingerprints(keys, used.tobytes())
        for key, position in chosen.items():
            self._add(key, (position | number << 32).to_bytes(_POSITION_BYTES, "little"))
        return tuple(chosen)

    def remove(self, number: int, fingerprints: tuple[int, ...]) -> None:
        """Remove a text, by the fingerprints that ``add`` returned."""
        for key in fingerprints:
            there = self._positions.get(key, b"")
            kept = b"".join(position for position in _split(there) if _number(position) != number)
            if len(kept) == len(there):  # a newer text has displaced it
                continue
            self._count(key, -1)
            if kept:
                self._positions[key] = kept
            else:
                del self._positions[key]

    def find(self, keys: Keys) -> CandidateAlignments:
        """Look up the k-grams of a text; return the possible alignments of indexed texts with it.

        The work is bounded: of a fingerprint that occurs very often in the text only the first
        positions are used, and rare fingerprints come before those that many texts share.
        """
        near = np.flatnonzero(self._counted[keys >> np.uint64(self._shift)])
        near = _sort_positions(keys, near)
        begins = _group_starts(keys[near])
        times = np.diff(begins, append=len(near))
        texts = [self._positions.get(key, b"") for key in keys[near[begins]].tolist()]
        return _group_alignments(*_pair_positions(texts, keys, near, begins, times))

    def _add(self, key: int, position: bytes) -> None:
        there = self._positions.get(key, b"")
        # Drop the oldest text: passages that were just retrieved must be found.
        if len(there) == _MAX_TEXTS * _POSITION_BYTES:
            there = there[_POSITION_BYTES:]
        else:
            self._count(key, 1)
        self._positions[key] = there + position

    def _count(self, key: int, change: int) -> None:
        counter = key >> self._shift
        if self._counters[counter] < 255:  # saturated: the true count is unknown from here on
            self._counters[counter] += change


def _select_fingerprints(keys: Keys, used: bytes) -> dict[int, int]:
    """Return a text's fingerprints (key to position), given how often each k-gram is used."""
    positions = list(_rarest_offsets(used))
    written = (_context_tags(keys, np.array(positions)) | positions).tolist()
    return dict(zip(reversed(keys[positions].tolist()), reversed(written), strict=True))


def _rarest_offsets(used: bytes) -> Iterator[int]:
    """Yield the least used offset of a window, then of the window after that offset, and so on.

    Of equally used offsets, yield the last.
    In a shorter window at the end, yield an offset only if it is unused: it may be the only
    distinctive part of the text.
    """
    at = -1
    while (begin := at + 1) < len(used):
        window = used[begin : begin + _WINDOW]
        free = window.rfind(0)
        if free < 0 and begin and len(window) < _WINDOW:
            return
        at = begin + (free if free >= 0 else window.rfind(min(window)))
        yield at


def _split(positions: bytes) -> Iterator[bytes]:
    return (positions[i : i + _POSITION_BYTES] for i in range(0, len(positions), _POSITION_BYTES))


def _number(position: bytes) -> int:
    """Return the text number in an encoded position."""
    return int.from_bytes(position[4:_POSITION_BYTES], "little")


def _sort_positions(keys: Keys, positions: Positions) -> Positions:
    """Return positions sorted by their keys, in the given order for equal keys.

    Key and position are sorted as one number without the key's last bits, which is much faster.
    """
    bits = len(keys).bit_length()
    both = (keys[positions] >> np.uint64(bits)) << np.uint64(bits) | positions.astype(np.uint64)
    both.sort()
    ordered: Positions = (both & np.uint64((1 << bits) - 1)).astype(np.intp)
    return ordered


def _group_starts(column: NDArray[Any]) -> Positions:
    """Return the indices at which a value differs from the one before, index 0 included."""
    is_new = np.ones(len(column), bool)
    is_new[1:] = column[1:] != column[:-1]
    return np.flatnonzero(is_new)


def _context_tags(keys: Keys, at: Positions) -> Positions:
    """Return bits of an encoded position: tags of the k-grams before and after those at ``at``.

    A tag is 0 at either end of the text.

    A part of ``2 * _MARGIN + KGRAM_LENGTH`` characters that holds a k-gram extends by ``_MARGIN``
    characters on at least one side of it.
    """
    tags = np.zeros(len(keys) + 2 * _MARGIN, np.intp)
    tags[_MARGIN:-_MARGIN] = keys % np.uint64(_TAG) + np.uint64(1)
    around: Positions = tags[at] << _BEFORE | tags[at + 2 * _MARGIN] << _AFTER
    return around


def _pair_positions(
    texts: list[bytes], keys: Keys, near: Positions, begins: Positions, times: Positions
) -> tuple[Positions, Positions, NDArray[np.float64]]:
    """Pair positions of fingerprints in texts with those in ``near[begin : begin + times]``.

    Pairs whose context differs on both sides are dropped: they cannot extend far enough.

    Returns:
        the diagonal (text number and shift), the offset in the searched text, and the weight.
    """
    num_texts = np.array(list(map(len, texts)), np.intp) // _POSITION_BYTES
    times = np.minimum(times, _MAX_PAIRS // np.maximum(num_texts, 1))
    sizes = num_texts * times
    common = min(_MIN_COMMON_PAIRS + len(keys) // 8, _MAX_COMMON_PAIRS)
    room = min(sizes[sizes <= _RARE_PAIRS].sum(), _MAX_RARE_PAIRS) + common
    rarest = np.argsort(sizes.astype(np.uint8), kind="stable")
    rarest = rarest[np.count_nonzero(sizes == 0) :]
    rarest = rarest[: np.searchsorted(np.cumsum(sizes[rarest]), room, "right")]
    positions = np.frombuffer(b"".join([texts[i] for i in rarest.tolist()]), "<i8").astype(np.intp)
    fingerprint = np.repeat(rarest, num_texts[rarest])  # the fingerprint of each position
    each = times[fingerprint]
    within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    at = near[np.repeat(begins[fingerprint], each) + within]
    position, weight = np.repeat(positions, each), np.repeat(1 / sizes[fingerprint], each)
    own, here = position & _TAG_MASK, _context_tags(keys, at)
    alike = ((own ^ here) & _TAGS[:, None] == 0) & (own & _TAGS[:, None] != 0)
    going_on = np.flatnonzero(alike.any(0) | (own == 0))
    position, at = position[going_on], at[going_on]
    return (position >> 32 << 32) + (position & _OFFSET_MASK) - at, at, weight[going_on]


def _group_alignments(
    diagonal: Positions, at: Positions, weight: NDArray[np.float64]
) -> CandidateAlignments:
    """Group pairs by diagonal into alignments, rarest first.

    A diagonal holds the text's number in its upper bits, and minus the shift in its lower 32.
    """
    order = np.argsort(diagonal)
    diagonal = diagonal[order]
    begin = _group_starts(diagonal)
    end = np.append(begin[1:], len(order))[: len(begin)]
    rarity = np.add.reduceat(weight[order], begin) if len(begin) else weight
    number = (diagonal[begin] + (1 << 31)) >> 32
    shift = (number << 32) - diagonal[begin]
    rare, common = np.flatnonzero(rarity >= _RARE), np.flatnonzero(rarity < _RARE)
    rare = rare[np.argsort(-rarity[rare])]
    common = _limit_per_region(common, at[order[begin[common]]] // _REGION)
    best = np.concatenate([rare, common])[:_MAX_ALIGNMENTS]
    return CandidateAlignments(
        number[best], shift[best], begin[best], end[best], rarity[best], at[order]
    )


def _limit_per_region(alignments: Positions, regions: Positions) -> Positions:
    """Return at most ``_MAX_PER_REGION`` common alignments of each region.

    Of more than ``_MAX_COMMON_ALIGNMENTS`` in all, return those of the first regions.
    """
    order = np.argsort(regions)
    begins = _group_starts(regions[order])
    sizes = np.diff(begins, append=len(order))
    within = np.arange(len(order)) - np.repeat(begins, sizes)
    some = order[within < _MAX_PER_REGION]
    if len(some) > _MAX_COMMON_ALIGNMENTS:  # drop the last region: its alignments would look rare
        some = some[regions[some] < regions[some[_MAX_COMMON_ALIGNMENTS]]]
    chosen: Positions = alignments[some]
    return chosen


MIN_COMMON = 96  # characters, a run of whitespace taken as one
_MIN_COMMON_COMPACT = MIN_COMMON // 2  # without whitespace, at most every second character
_MAX_SHARED_BY = 4  # a part that more texts than this share is not distinctive
_MAX_VERSIONS = 32  # the same bound for a part that is at least half of its text
_MAX_COMPARED = 1_000  # alignments that are compared character by character
_MAX_PARTS = 8  # of one text
_MAX_SHARING = 40  # number of texts compared at one part; further ones change nothing
_MIN_DISTINCT = 8  # characters that few texts share; longer chance agreements are rare
_REACH = 256  # characters on each side of a position that are compared at first
_WHITESPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # none above that


def remove_whitespace(text: str) -> str:
    """Return a text without its whitespace, so that line breaks and indentation do not matter."""
    return "".join(text.split())


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


class SearchedText:
    """The text in which others are searched: as it is, and without whitespace (``compact``)."""

    def __init__(self, text: str) -> None:
        self.text, self.compact = text, remove_whitespace(text)

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """Return the characters of ``compact`` as numbers."""
        return _codes(self.compact)

    @cached_property
    def offsets(self) -> NDArray[np.intp]:
        """Return the offset in ``text`` of each character of ``compact``."""
        codes = _codes(self.text)
        return np.flatnonzero(~_WHITESPACE[np.minimum(codes, len(_WHITESPACE) - 1)])

    def size(self, start: int, end: int) -> int:
        """Return the length in ``text`` of a part of ``compact``; whitespace runs count as 1."""
        if end - start < _MIN_COMMON_COMPACT:
            return end - start  # too short, whatever whitespace it has
        return end - start + int(self._gaps[end - 1] - self._gaps[start])

    @cached_property
    def _gaps(self) -> NDArray[np.intp]:
        """Return the number of whitespace runs before each character of ``compact``."""
        return np.append(0, np.cumsum(self.offsets[1:] - self.offsets[:-1] > 1))

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Return the offsets [start, end) in ``text`` of a part of ``compact``."""
        return int(self.offsets[start]), int(self.offsets[end - 1]) + 1


@dataclass(frozen=True, slots=True)
class Alignment:
    """A part [start, end) of the searched text that equals an indexed text or a part of it.

    Offsets are without whitespace. The part begins at ``start - shift`` of text ``number``;
    ``whole`` means that it is all of that text.
    """

    number: int
    start: int
    end: int
    whole: bool
    shift: int


class Candidate(Protocol):
    """A text that may occur in the searched one; of equal texts the last registered is chosen."""

    @property
    def compact(self) -> str:
        """Return the text without its whitespace."""

    @property
    def registered(self) -> int:
        """Return a number that is higher for texts registered later."""


def find_alignments(
    searched: SearchedText, candidates: Mapping[int, Candidate], alignments: CandidateAlignments
) -> list[Alignment]:
    """Return the candidates that occur in a text, whole or in part, in the text's order.

    Whole texts take precedence over parts. A part counts if it has ``MIN_COMMON`` characters, is
    not covered by other alignments, and is shared by few texts, or by some more if it is at least
    half of its own text: boilerplate does not show which document occurs. All parts of a text are
    returned. Alignments of texts that are not candidates are ignored.
    """
    covered = bytearray(len(searched.compact))
    whole = _whole_alignments(searched.compact, candidates, alignments, covered)
    left = _uncovered(alignments, candidates.keys() - whole.keys(), candidates, covered)
    parts = _common_parts(searched, candidates, left)
    found = [*whole.values(), *_select_parts(parts, candidates, covered)]
    return sorted(found, key=lambda one: (one.start, one.end))


def _whole_alignments(
    text: str,
    candidates: Mapping[int, Candidate],
    alignments: CandidateAlignments,
    covered: bytearray,
) -> dict[int, Alignment]:
    """Return the first whole alignment of each text, by number; mark all of them as covered."""
    whole: dict[int, Alignment] = {}
    texts = {number: one.compact for number, one in candidates.items()}
    for number, at in zip(alignments.number.tolist(), alignments.shift.tolist(), strict=True):
        own = texts.get(number)
        if at >= 0 and own and text.startswith(own, at):
            _cover(covered, at, at + len(own))
            if number not in whole or at < whole[number].start:
                whole[number] = Alignment(number, at, at + len(own), True, at)
    return whole


def _uncovered(
    alignments: CandidateAlignments,
    numbers: Set[int],
    candidates: Mapping[int, Candidate],
    covered: bytearray,
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the number, shift and positions of alignments with positions not yet covered.

    Covered positions are left out. The rarest alignments come first; of equally rare ones, those
    with the longest possible common part.
    """
    is_open = np.frombuffer(covered, np.uint8)[alignments.positions] == 0
    before = np.append(0, np.cumsum(is_open))
    begin, end = before[alignments.begin], before[alignments.end]
    left = np.flatnonzero(end > begin)
    number, shift = alignments.number[left], alignments.shift[left]
    size = np.array(
        [len(candidates[n].compact) if n in numbers else 0 for n in number.tolist()], np.intp
    )
    in_common = np.minimum(shift + size, len(covered)) - np.maximum(shift, 0)
    best = np.lexsort((-in_common, -alignments.rarity[left]))
    best = best[size[best] > 0]
    positions = alignments.positions[is_open].tolist()
    columns = (number[best], shift[best], begin[left[best]], end[left[best]])
    for one, moved, first, last in zip(*(c.tolist() for c in columns), strict=True):
        yield one, moved, positions[first:last]


def _common_parts(
    searched: SearchedText,
    candidates: Mapping[int, Candidate],
    alignments: Iterable[tuple[int, int, list[int]]],
) -> dict[int, list[_Part]]:
    """Return, for each text number, the text's parts in the searched one that are long enough."""
    parts: dict[int, list[_Part]] = {}
    sharing = np.zeros(len(searched.compact), np.uint16)
    shared = sharing.data  # faster for reading single elements
    common: set[tuple[int, int]] = set()  # fingerprints of texts in parts that many texts share
    compared = 0
    for number, shift, positions in alignments:
        first = min(positions)
        if shared[first] > _MAX_SHARING and shared[max(positions)] > _MAX_SHARING:
            common.add((number, first - shift))
            continue
        known = parts.get(number, [])
        if (number, first - shift) in common or len(known) >= _MAX_PARTS:
            continue
        compared += 1
        own, end = candidates[number].compact, 0
        for at in sorted(positions):
            if at < end or any(part.start <= at < part.end for part in known):
                continue
            start, end = _extend(searched.codes, own, at, shift)
            if searched.size(start, end) >= MIN_COMMON:
                known = parts.setdefault(number, known)
                known.append(_Part(start, end, shift))
                sharing[start:end] += 1
        if compared == _MAX_COMPARED:
            break
    return parts


class _Part(NamedTuple):
    """A part [start, end) of the searched text; it begins at ``start - shift`` of its own text."""

    start: int
    end: int
    shift: int


def _size(parts: Sequence[_Part]) -> int:
    """Return how many characters of their text these parts cover, overlaps counted once."""
    if len(parts) == 1:
        return parts[0].end - parts[0].start
    size = reach = 0
    for start, end in sorted((part.start - part.shift, part.end - part.shift) for part in parts):
        size += max(0, end - max(start, reach))
        reach = max(reach, end)
    return size


def _extend(codes: NDArray[np.uint32], own: str, at: int, shift: int) -> tuple[int, int]:
    """Return [start, end) of the longest equal text around offset ``at`` of an alignment."""
    reach = _REACH
    while True:
        begin, end = max(at - reach, shift, 0), min(at + reach, shift + len(own), len(codes))
        differs = (codes[begin:end] != _codes(own[begin - shift : end - shift])).tobytes()
        first = differs.rfind(1, 0, at - begin) + 1
        last = differs.find(1, at - begin) % (len(differs) + 1)  # not found: -1 becomes the length
        if (first or at - begin < reach) and (last < len(differs) or end - at < reach):
            return begin + first, begin + last
        reach *= 8


def _select_parts(
    parts: Mapping[int, Sequence[_Part]], candidates: Mapping[int, Candidate], covered: bytearray
) -> Iterator[Alignment]:
    """Yield the distinctive parts, first of the text that has the most characters in its parts."""
    changes = np.zeros(len(covered) + 1, np.int32)
    for start, end, _ in chain.from_iterable(parts.values()):
        changes[start] += 1
        changes[end] -= 1
    sharing = np.cumsum(changes)
    boilerplate, versions = ((sharing > most).tobytes() for most in (_MAX_SHARED_BY, _MAX_VERSIONS))
    sizes = {number: _size(own) for number, own in parts.items()}
    for number in sorted(parts, key=lambda n: (sizes[n], candidates[n].registered), reverse=True):
        is_most = 2 * sizes[number] >= len(candidates[number].compact)
        common = versions if is_most else boilerplate
        kept: list[tuple[int, int]] = []
        for part in sorted(parts[number], key=lambda part: -covered.count(0, *part[:2])):
            start, end, shift = part
            is_new = not any(a <= start - shift and end - shift <= b for a, b in kept)
            if is_new and _is_distinctive(start, end, covered, common):
                kept.append((start - shift, end - shift))
                common = boilerplate  # only the largest part may be shared by more texts
                yield Alignment(number, start, end, False, shift)
                _cover(covered, start, end)
            elif not kept:  # its largest part is not distinctive
                break
        for part in parts[number] if kept else ():
            _cover(covered, part.start, part.end)


def _is_distinctive(start: int, end: int, covered: bytearray, common: bytes) -> bool:
    """Return whether a part has enough text that is neither covered nor shared by many."""
    is_open = covered.count(0, start, end) >= KGRAM_LENGTH
    return is_open and end - start - _longest_run(common[start:end]) >= _MIN_DISTINCT


def _longest_run(flags: bytes) -> int:
    """Return the length of the longest run of set flags."""
    return max(map(len, flags.split(b"\0"))) if 1 in flags else 0


def _cover(covered: bytearray, start: int, end: int) -> None:
    covered[start:end] = b"\1" * (end - start)
