"""Neighbours: the passages of each document in the order in which they stand in it."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_NEAR = 32  # passages on either side of one that are looked at


class DocumentOrder:
    """Numbers of passages by document, a namespace and a name, sorted by where they start."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def add(self, number: int, document: tuple[str, str], start: int) -> None:
        """Add a passage."""
        insort(self._starts.setdefault(document, []), (start, number))

    def remove(self, number: int, document: tuple[str, str], start: int) -> None:
        """Take out a passage that was added like that."""
        order = self._starts[document]
        del order[bisect_left(order, (start, number))]
        if not order:
            del self._starts[document]

    def nearest(self, document: tuple[str, str], starts: Iterable[int]) -> dict[int, int]:
        """Find the passages round some places, and how far each starts from the nearest of them.

        Of too many that start at one place there are the newest: where nobody tells starts, all
        start at 0.
        """
        order = self._starts.get(document, [])
        near: dict[int, int] = {}
        for place in set(starts):
            middle = bisect_left(order, (place + 1, 0))
            for start, number in order[max(0, middle - _MOST_NEAR) : middle + _MOST_NEAR]:
                distance = abs(start - place)
                near[number] = min(distance, near.get(number, distance))
        return near
