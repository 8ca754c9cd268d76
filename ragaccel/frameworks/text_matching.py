"""Text matching: fingerprints (winnowing) and alignment of passages in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from numpy.typing import NDArray


if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]
    Places = NDArray[np.intp]

ANCHOR = 20  # characters of an anchor
_STRIDE = 48  # of so many neighbouring places in a text, one at least is an anchor
_SHARED = 16  # texts that may have the same anchor
_CROWD = 4  # texts with the same anchor: with more it says little about each
_PAIRS = 64  # of a place in the searched text and one in another, by the same anchor
_FEW_PAIRS = 8
_MOST_PLACES = 30_000  # pairs by anchors that have few
_FEW_COMMON, _MOST_COMMON = 500, 6_000  # pairs by the others: one for 8 characters, within these
_MOST_ALIGNMENTS = 4_000
_MOST_COMMON_ALIGNMENTS = 1_000
_REGION = 256  # characters
_MOST_OF_REGION = 48  # common alignments that begin there: enough to know that many do
_RARE = 0.5  # so rare is an alignment that is not common
# A place is 8 bytes: the text's number, 6 bits each for what is before and behind, where it is
_PLACE = 8
_BEFORE, _BEHIND = 26, 20
_TAG = 63
_TAGS = np.array([_TAG << _BEFORE, _TAG << _BEHIND])
_AROUND, _AT = int(_TAGS.sum()), (1 << _BEHIND) - 1
_MORE = 14  # characters on one side of a piece, at least, in a part that is long enough
ANCHOR_BYTES = 150  # with its place in the index, measured
_KEY_BITS = 60  # so that Python keeps a key in 32 bytes
_FACTORS = [np.uint64(pow(0x9E3779B97F4A7C15, 2**i, 2**64)) for i in range(4)]
_STIR = np.uint64(0xD6E8FEB86659FD93)


def anchor_keys(text: str, seed: int) -> Keys:
    """The keys of a text's pieces of ``ANCHOR`` characters, one for every place.

    A polynomial of the characters, made by doubling; equal pieces of one seed have equal keys.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    if len(codes) < ANCHOR:
        return codes[:0]
    two = codes[:-1] * _FACTORS[0] + codes[1:]
    four = two[:-2] * _FACTORS[1] + two[2:]
    eight = four[:-4] * _FACTORS[2] + four[4:]
    keys: Keys = eight[:-8] * _FACTORS[3] + eight[8:]
    keys = keys[:-4] * _FACTORS[2] + four[16:]
    keys += np.uint64(seed)
    keys ^= keys >> np.uint64(32)
    keys *= _STIR
    keys >>= np.uint64(64 - _KEY_BITS)
    return keys


class Pieces:
    """A text as an index takes it in: the keys of its pieces."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    @cached_property
    def alone(self) -> dict[int, int]:
        """Its anchors, keys and places, where no other text uses any of its pieces."""
        return _chosen(self.keys, bytes(len(self.keys)))


class Alignments(NamedTuple):
    """Ways in which texts may stand in the searched one, the rarest first; columns of one length.

    Text ``number`` stands ``shift`` characters behind its own places, since it has anchors at
    ``places[begin:end]`` of the searched text in common. The fewer texts share those, and the fewer
    places, the higher is ``rarity``.
    """

    number: Places
    shift: Places
    begin: Places
    end: Places
    rarity: NDArray[np.float64]
    places: Places


class AnchorIndex:
    """Which text has which anchors where, and how much each is used.

    Any ``_STRIDE + ANCHOR - 1`` characters of a text have an anchor. Where there is a choice, the
    piece that fewest texts use is taken: so what tells a text from its like becomes its anchor,
    and texts that share all they have share out their places. Not thread-safe.
    """

    def __init__(self, num_counters: int) -> None:
        bits = max(12, num_counters.bit_length())
        self._counters = bytearray(1 << bits)  # of the anchors whose keys begin alike
        self._counted = np.frombuffer(self._counters, np.uint8)
        self._shift = _KEY_BITS - bits
        self._places: dict[int, bytes] = {}  # no containers: nothing to collect
        self._displaced: set[int] = set()  # the texts that newer ones took an anchor from

    @property
    def num_bytes(self) -> int:
        """How large the counters are; each anchor takes ``ANCHOR_BYTES`` beside them."""
        return len(self._counters)

    def add(self, number: int, pieces: Pieces) -> tuple[int, ...]:
        """Choose the anchors of a text that is new here; ``remove`` wants them back."""
        used = self._counted[pieces.keys >> np.uint64(self._shift)]
        chosen = _chosen(pieces.keys, used.tobytes()) if used.any() else pieces.alone
        for key, place in chosen.items():
            self._put(key, (place | number << 32).to_bytes(_PLACE, "little"))
        return tuple(chosen)

    def is_hidden(self, number: int, anchors: tuple[int, ...]) -> bool:
        """Whether a text is hard to find by now: to be removed, and added with other anchors."""
        if number in self._displaced:
            return True
        return min(self._counters[key >> self._shift] for key in anchors) > _CROWD

    def remove(self, number: int, anchors: tuple[int, ...]) -> None:
        """Take a text out, by the anchors that ``add`` chose."""
        self._displaced.discard(number)
        for key in anchors:
            there = self._places.get(key, b"")
            kept = b"".join(place for place in _split(there) if _number(place) != number)
            if len(kept) == len(there):  # it was taken by a newer text
                continue
            self._count(key, -1)
            if kept:
                self._places[key] = kept
            else:
                del self._places[key]

    def find(self, keys: Keys) -> Alignments:
        """Look up every place of a text: how the texts here may stand in it, the rarest first.

        Bounded: of an anchor that stands there very often the first places are looked at, and
        where many texts share anchors, the rarer ones.
        """
        near = np.flatnonzero(self._counted[keys >> np.uint64(self._shift)])
        near = _in_order(keys, near)
        begins = _begins(keys[near])
        times = np.diff(begins, append=len(near))
        texts = [self._places.get(key, b"") for key in keys[near[begins]].tolist()]
        return _grouped(*_paired(texts, keys, near, begins, times))

    def _put(self, key: int, place: bytes) -> None:
        there = self._places.get(key, b"")
        if len(there) == _SHARED * _PLACE:  # the newest win: what was just retrieved must be found
            self._displaced.add(_number(there))
            there = there[_PLACE:]
        else:
            self._count(key, 1)
        self._places[key] = there + place

    def _count(self, key: int, change: int) -> None:
        counter = key >> self._shift
        if self._counters[counter] < 255:  # there it stays: how many more there are is not known
            self._counters[counter] += change


def _chosen(keys: Keys, used: bytes) -> dict[int, int]:
    """A text's anchors, by how much each of its pieces is used: their keys and places."""
    places = list(_least_used(used))
    written = (_around(keys, np.array(places)) | places).tolist()
    return dict(zip(reversed(keys[places].tolist()), reversed(written), strict=True))


def _least_used(used: bytes) -> Iterator[int]:
    """Of every ``_STRIDE`` places after the one before, the least used; of equals the last.

    Of fewer at the end, one that nothing uses: what is told apart there is told apart by it.
    """
    at = -1
    while (begin := at + 1) < len(used):
        window = used[begin : begin + _STRIDE]
        free = window.rfind(0)
        if free < 0 and begin and len(window) < _STRIDE:
            return
        at = begin + (free if free >= 0 else window.rfind(min(window)))
        yield at


def _split(places: bytes) -> Iterator[bytes]:
    return (places[i : i + _PLACE] for i in range(0, len(places), _PLACE))


def _number(place: bytes) -> int:
    """The text of a place, the first one's of several."""
    return int.from_bytes(place[4:_PLACE], "little")


def _in_order(keys: Keys, places: Places) -> Places:
    """Places sorted by their keys, those of one key as they are.

    Both are sorted as one number, the key's last bits left out: it is many times faster so.
    """
    bits = len(keys).bit_length()
    both = (keys[places] >> np.uint64(bits)) << np.uint64(bits) | places.astype(np.uint64)
    both.sort()
    ordered: Places = (both & np.uint64((1 << bits) - 1)).astype(np.intp)
    return ordered


def _begins(column: NDArray[Any]) -> Places:
    """Where numbers begin that are not like the one before."""
    is_new = np.ones(len(column), bool)
    is_new[1:] = column[1:] != column[:-1]
    return np.flatnonzero(is_new)


def _around(keys: Keys, at: Places) -> Places:
    """What stands before and behind pieces, in a place's bits: zero where the text is at its end.

    A part of ``2 * _MORE + ANCHOR`` characters that holds a piece goes on for ``_MORE`` characters
    on one side of it at least.
    """
    tags = np.zeros(len(keys) + 2 * _MORE, np.intp)
    tags[_MORE:-_MORE] = keys % np.uint64(_TAG) + np.uint64(1)
    around: Places = tags[at] << _BEFORE | tags[at + 2 * _MORE] << _BEHIND
    return around


def _paired(
    texts: list[bytes], keys: Keys, near: Places, begins: Places, times: Places
) -> tuple[Places, Places, NDArray[np.float64]]:
    """Pair each anchor's places in texts with its places ``near[begin : begin + times]``.

    What cannot be part of a long enough one is left out.
    """
    num_texts = np.array(list(map(len, texts)), np.intp) // _PLACE
    times = np.minimum(times, _PAIRS // np.maximum(num_texts, 1))
    sizes = num_texts * times
    common = min(_FEW_COMMON + len(keys) // 8, _MOST_COMMON)
    room = min(sizes[sizes <= _FEW_PAIRS].sum(), _MOST_PLACES) + common
    rarest = np.argsort(sizes.astype(np.uint8), kind="stable")
    rarest = rarest[np.count_nonzero(sizes == 0) :]
    rarest = rarest[: np.searchsorted(np.cumsum(sizes[rarest]), room, "right")]
    places = np.frombuffer(b"".join([texts[i] for i in rarest.tolist()]), "<i8").astype(np.intp)
    anchor = np.repeat(rarest, num_texts[rarest])  # of each of those places
    each = times[anchor]
    within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    at = near[np.repeat(begins[anchor], each) + within]
    place, weight = np.repeat(places, each), np.repeat(1 / sizes[anchor], each)
    own, here = place & _AROUND, _around(keys, at)
    alike = ((own ^ here) & _TAGS[:, None] == 0) & (own & _TAGS[:, None] != 0)
    going_on = np.flatnonzero(alike.any(0) | (own == 0))
    place, at = place[going_on], at[going_on]
    return (place >> 32 << 32) + (place & _AT) - at, at, weight[going_on]


def _grouped(diagonal: Places, at: Places, weight: NDArray[np.float64]) -> Alignments:
    """Group places by what a text's number, above 32 bits, and the shift of its place make."""
    order = np.argsort(diagonal)
    diagonal = diagonal[order]
    begin = _begins(diagonal)
    end = np.append(begin[1:], len(order))[: len(begin)]
    rarity = np.add.reduceat(weight[order], begin) if len(begin) else weight
    number = (diagonal[begin] + (1 << 31)) >> 32
    shift = (number << 32) - diagonal[begin]
    rare, common = np.flatnonzero(rarity >= _RARE), np.flatnonzero(rarity < _RARE)
    rare = rare[np.argsort(-rarity[rare])]
    common = _some_of_each_region(common, at[order[begin[common]]] // _REGION)
    best = np.concatenate([rare, common])[:_MOST_ALIGNMENTS]
    return Alignments(number[best], shift[best], begin[best], end[best], rarity[best], at[order])


def _some_of_each_region(alignments: Places, regions: Places) -> Places:
    """Of common alignments those of the first regions: enough of each to know that they are."""
    order = np.argsort(regions)
    begins = _begins(regions[order])
    sizes = np.diff(begins, append=len(order))
    within = np.arange(len(order)) - np.repeat(begins, sizes)
    some = order[within < _MOST_OF_REGION]
    if len(some) > _MOST_COMMON_ALIGNMENTS:  # a region of which only some are there looks rare
        some = some[regions[some] < regions[some[_MOST_COMMON_ALIGNMENTS]]]
    chosen: Places = alignments[some]
    return chosen


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
