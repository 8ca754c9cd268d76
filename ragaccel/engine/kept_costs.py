"""Kept costs: what passes cost, by what makes them differ, kept on disk from run to run."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any

from ragaccel.decoding.request import NO_RULES
from ragaccel.engine.cost import PassCost
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ragaccel.decoding.request import Request

_FORMAT = "ragaccel pass costs 1"
_SAVE_AFTER = 256  # passes
_GREEDY = "greedy"
_SHORT = 1024  # tokens; below, the weights make out what a pass costs
_MOST_ROWS = 4096

logger = logging.getLogger("ragaccel")


def way_of_choosing(request: Request) -> str:
    """How the tokens of a request are chosen, as far as its settings make a row dearer."""
    sampling = request.sampling
    way = _GREEDY if sampling.is_greedy else "sampled"
    if way != _GREEDY and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        way = "filtered"
    is_ruled = request.score_rules != NO_RULES
    if request.repetition_penalty != 1.0 or request.no_repeat_ngram_size or is_ruled:
        way += ", penalized"
    if request.processors:
        way += ", processed"
    return way


@dataclass(frozen=True, slots=True)
class PassKind:
    """What makes passes of as many rows cost differently, rounded up to powers of two.

    ``attended`` counts the tokens of the longest sequence, 1,024 and less being one kind.
    """

    way: str = _GREEDY
    attended: int = _SHORT
    sequences: int = 1

    @classmethod
    def of(cls, way: str, attended: int, sequences: int = 1) -> PassKind:
        """Round up."""
        return cls(way, max(_SHORT, _power(attended)), _power(sequences))

    @property
    def name(self) -> str:
        """What it is called in a file."""
        length = f", {self.attended} tokens" if self.attended > _SHORT else ""
        return f"{self.way}{length}" + (f", x{self.sequences}" if self.sequences > 1 else "")

    def nearest(self) -> Iterator[str]:
        """Name the kinds whose costs tell most about it, the most telling first."""
        for way in dict.fromkeys((self.way, _GREEDY)):
            for sequences in dict.fromkeys((self.sequences, 1)):
                attended = self.attended
                while attended >= _SHORT:
                    yield PassKind(way, attended, sequences).name
                    attended //= 2


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class KeptCosts:
    """A ``PassCost`` for each kind of pass; a file of them is a prior for the next run.

    A file that is no such file, or cannot be written, does no harm: costs are learned anew. It is
    written after every few hundred passes, atomically. Shared by threads.

    Args:
        row_share: prior cost of one more row, as a share of a one-row pass.
        path: the file, of one model on one device; without it nothing is kept.

    ``threads`` is how many of a processor's threads were measured to be fastest, None if that
    was not measured.
    """

    def __init__(self, row_share: float, path: Path | None = None) -> None:
        self.path = path
        self._row_share = row_share
        self.threads, self._known = _read(path) if path is not None else (None, {})
        self._costs: dict[str, PassCost] = {}
        self._lock = RLock()  # a request that is dropped may be closed anywhere, here too
        self._num_saved = 0

    def of(self, way: str, attended: int = 0, sequences: int = 1) -> PassCost:
        """Return the costs of one kind of pass; the nearest known are a new one's prior."""
        kind = PassKind.of(way, attended, sequences)
        with self._lock:
            found = self._costs.get(kind.name)
            if found is None:
                known = next(filter(None, map(self._seconds, kind.nearest())), None)
                found = self._costs[kind.name] = PassCost(self._row_share, known)
            return found

    def replace(self, way: str, seconds: dict[int, float], attended: int = 0) -> None:
        """Take measured seconds by rows in place of what was known of one kind of pass."""
        name = PassKind.of(way, attended).name
        with self._lock:
            self._known[name] = dict(seconds)
            self._costs[name] = PassCost(self._row_share, seconds)

    def _seconds(self, name: str) -> Mapping[int, float] | None:
        seen = self._costs.get(name)
        return seen.by_rows() if seen is not None and seen.num_passes else self._known.get(name)

    def by_way(self) -> dict[str, dict[int, float]]:
        """Seconds by rows of each kind of pass that was seen or known."""
        with self._lock:
            seen = {way: cost.by_rows() for way, cost in self._costs.items() if cost.num_passes}
        return {**self._known, **seen}

    def save_in_time(self) -> None:
        """Save, if there was much to learn since the last time."""
        with self._lock:
            passes = sum(cost.num_passes for cost in self._costs.values())
            due = self.path is not None and passes >= self._num_saved + _SAVE_AFTER
            if due:
                self._num_saved = passes
        if due:
            self.save()

    def save(self) -> bool:
        """Write the file; say whether it could be written."""
        if self.path is None:
            return False
        kept = {way: rows for way, rows in self.by_way().items() if "processed" not in way}
        document: dict[str, Any] = {"format": _FORMAT, "seconds": kept}
        if self.threads is not None:
            document["threads"] = self.threads
        try:
            with replacing(self.path) as file:
                file.write(json.dumps(document, indent=1).encode())
        except OSError as error:
            logger.debug("pass costs are not kept: %s", error)
            return False
        return True


def _read(path: Path) -> tuple[int | None, dict[str, dict[int, float]]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            return None, {}
        threads = document.get("threads")
        if threads is not None and not (isinstance(threads, int) and 0 < threads <= _MOST_ROWS):
            return None, {}
        return threads, {way: _checked(rows) for way, rows in document["seconds"].items()}
    except Exception:  # learned anew: what it holds is no one's work
        return None, {}


def _checked(rows: Any) -> dict[int, float]:
    seconds = {int(number): float(value) for number, value in rows.items()}
    if not all(
        0 < number <= _MOST_ROWS and math.isfinite(value) and value > 0
        for number, value in seconds.items()
    ):
        raise ValueError("not a table of seconds by rows")
    return seconds
