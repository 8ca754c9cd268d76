"""Anchors: short pieces of kept texts, by which another text finds those that may stand in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]

ANCHOR = 20  # characters of an anchor
_STRIDE = 48  # of so many neighbouring places in a text, one at least is an anchor
_SHARED = 16  # texts that may have the same anchor
_REPEATS = 64  # places of the searched text at which one anchor is looked at
_MOST_PLACES = 20_000
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
        self.displaced: set[int] = set()  # the texts that newer ones took an anchor from

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

    def remove(self, number: int, anchors: tuple[int, ...]) -> None:
        """Take a text out, by the anchors that ``add`` chose."""
        self.displaced.discard(number)
        for key in anchors:
            there = self._at(key)
            kept = tuple(place for place in there if place >> 32 != number)
            if len(kept) == len(there):  # it was taken by a newer text
                continue
            self._count(key, -1)
            if kept:
                self._places[key] = kept if len(kept) > 1 else kept[0]
            else:
                del self._places[key]

    def find(self, keys: Keys) -> dict[int, list[tuple[int, int]]]:
        """Look up every place of a text: by number, where it has which place of that one.

        Bounded: of an anchor that stands there very often the first places are looked at, and
        where anchors are shared by many texts, the rarer ones.
        """
        near = np.flatnonzero(self._counted[keys >> np.uint64(self._shift)])
        at_of: dict[int, list[int]] = {}
        for key, at in zip(keys[near].tolist(), near.tolist(), strict=True):
            if key not in self._places:
                continue
            known = at_of.setdefault(key, [])
            if len(known) < _REPEATS:
                known.append(at)
        found = [(self._at(key), ats) for key, ats in at_of.items()]
        found.sort(key=lambda item: len(item[0]) * len(item[1]))
        by_number: dict[int, list[tuple[int, int]]] = {}
        room = _MOST_PLACES
        for there, ats in found:
            room -= len(there) * len(ats)
            if room < 0:
                break
            for place in there:
                number, of_text = place >> 32, place & 0xFFFFFFFF
                by_number.setdefault(number, []).extend((at, of_text) for at in ats)
        return by_number

    def _at(self, key: int) -> tuple[int, ...]:
        there = self._places.get(key, ())
        return there if isinstance(there, tuple) else (there,)

    def _put(self, key: int, place: int) -> None:
        there = self._at(key)
        if len(there) == _SHARED:  # the newest win: what was just retrieved must be found
            self.displaced.add(there[0] >> 32)
            there = there[1:]
        else:
            self._count(key, 1)
        self._places[key] = (*there, place) if there else place

    def _count(self, key: int, change: int) -> None:
        counter = key >> self._shift
        if self._counters[counter] < 255:  # there it stays: how many more there are is not known
            self._counters[counter] += change


def _least_used(used: bytes) -> Iterator[int]:
    """Of every ``_STRIDE`` places after the one before, the least used; of equals the last."""
    at = -1
    while (begin := at + 1) < len(used):
        window = used[begin : begin + _STRIDE]
        free = window.rfind(0)
        at = begin + (free if free >= 0 else window.rfind(min(window)))
        yield at
