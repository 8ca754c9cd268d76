"""Anchors: short pieces of kept texts, by which another text finds those that may stand in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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
_MOST_COMMON = 6_000  # pairs by the others
_MOST_ALIGNMENTS = 4_000
_MOST_COMMON_ALIGNMENTS = 1_000
_RARE = 0.5  # so rare is an alignment that is not common
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


class Alignment(NamedTuple):
    """A way in which a text may stand in the searched one: ``shift`` characters behind its own.

    They have the anchors at ``places`` of the searched text in common; the fewer texts share
    those, and the fewer places, the higher is ``rarity``.
    """

    number: int
    shift: int
    places: list[int]
    rarity: float


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
        self._places: dict[int, int | tuple[int, ...]] = {}
        self._displaced: set[int] = set()  # the texts that newer ones took an anchor from

    @property
    def num_bytes(self) -> int:
        """How large the counters are; each anchor takes ``ANCHOR_BYTES`` beside them."""
        return len(self._counters)

    def add(self, number: int, keys: Keys) -> tuple[int, ...]:
        """Choose the anchors of a text that is new here; ``remove`` wants them back."""
        used = self._counted[keys >> np.uint64(self._shift)].tobytes()
        places = list(_least_used(used))
        chosen = dict(zip(reversed(keys[places].tolist()), reversed(places), strict=True))
        for key, at in chosen.items():
            self._put(key, number << 32 | at)
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
            there = _as_tuple(self._places.get(key))
            kept = tuple(place for place in there if place >> 32 != number)
            if len(kept) == len(there):  # it was taken by a newer text
                continue
            self._count(key, -1)
            if kept:
                self._places[key] = kept if len(kept) > 1 else kept[0]
            else:
                del self._places[key]

    def find(self, keys: Keys) -> list[Alignment]:
        """Look up every place of a text: how the texts here may stand in it, the rarest first.

        Bounded: of an anchor that stands there very often the first places are looked at, and
        where many texts share anchors, the rarer ones.
        """
        near = np.flatnonzero(self._counted[keys >> np.uint64(self._shift)])
        near = near[np.argsort(keys[near], kind="stable")]
        begins = _begins(keys[near])
        times = np.diff(begins, append=len(near))
        there = [self._places.get(key) for key in keys[near[begins]].tolist()]
        known = [i for i, places in enumerate(there) if places is not None]
        texts = [_as_tuple(there[i]) for i in known]
        return _aligned(texts, near, begins[known], times[known])

    def _put(self, key: int, place: int) -> None:
        there = _as_tuple(self._places.get(key))
        if len(there) == _SHARED:  # the newest win: what was just retrieved must be found
            self._displaced.add(there[0] >> 32)
            there = there[1:]
        else:
            self._count(key, 1)
        self._places[key] = (*there, place) if there else place

    def _count(self, key: int, change: int) -> None:
        counter = key >> self._shift
        if self._counters[counter] < 255:  # there it stays: how many more there are is not known
            self._counters[counter] += change


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


def _as_tuple(places: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if places is None:
        return ()
    return places if isinstance(places, tuple) else (places,)


def _begins(column: NDArray[Any]) -> Places:
    """Where numbers begin that are not like the one before."""
    is_new = np.ones(len(column), bool)
    is_new[1:] = column[1:] != column[:-1]
    return np.flatnonzero(is_new)


def _aligned(
    texts: list[tuple[int, ...]], near: Places, begins: Places, times: Places
) -> list[Alignment]:
    """Pair each anchor's places in texts with its places ``near[begin : begin + times]``."""
    num_texts = np.array([len(there) for there in texts], np.intp)
    times = np.minimum(times, _PAIRS // num_texts)
    sizes = num_texts * times
    rarest = np.argsort(sizes, kind="stable")
    room = min(sizes[sizes <= _FEW_PAIRS].sum(), _MOST_PLACES) + _MOST_COMMON
    rarest = rarest[: np.searchsorted(np.cumsum(sizes[rarest]), room, "right")]
    if not len(rarest):
        return []
    places = np.array([place for i in rarest.tolist() for place in texts[i]])
    anchor = np.repeat(rarest, num_texts[rarest])  # of each of those places
    each = times[anchor]
    within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    at = near[np.repeat(begins[anchor], each) + within]
    place, weight = np.repeat(places, each), np.repeat(1 / sizes[anchor], each)
    return _grouped(place - at, at, weight)


def _grouped(diagonal: Places, at: Places, weight: NDArray[np.float64]) -> list[Alignment]:
    """Group places by what a text's number, above 32 bits, and the shift of its place make."""
    order = np.argsort(diagonal)
    diagonal, found_at = diagonal[order], at[order].tolist()
    begins = _begins(diagonal)
    ends = np.append(begins[1:], len(order))
    rarity = np.add.reduceat(weight[order], begins)
    number = (diagonal[begins] + (1 << 31)) >> 32
    shift = (number << 32) - diagonal[begins]
    is_rare = (
        rarity >= _RARE
    )  # the others from the text's start on: all that share a place together
    best = np.lexsort((shift, -rarity * is_rare))
    best = best[: min(_MOST_ALIGNMENTS, np.count_nonzero(is_rare) + _MOST_COMMON_ALIGNMENTS)]
    columns = (number, shift, begins, ends, rarity)
    return [
        Alignment(text, moved, found_at[begin:end], rare)
        for text, moved, begin, end, rare in zip(
            *(column[best].tolist() for column in columns), strict=True
        )
    ]
