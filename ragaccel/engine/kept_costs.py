"""Kept costs: what passes cost, by the way tokens are chosen, kept on disk from run to run."""

from __future__ import annotations

import json
import logging
import math
from threading import RLock
from typing import TYPE_CHECKING, Any

from ragaccel.engine.cost import PassCost
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.decode.request import Request

_FORMAT = "ragaccel pass costs 1"
_SAVE_AFTER = 256  # passes
_GREEDY = "greedy"
_MOST_ROWS = 4096

logger = logging.getLogger("ragaccel")


def way_of_choosing(request: Request) -> str:
    """How the tokens of a request are chosen, as far as its settings make a row dearer."""
    sampling = request.sampling
    way = _GREEDY if sampling.is_greedy else "sampled"
    if way != _GREEDY and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        way = "filtered"
    if request.repetition_penalty != 1.0 or request.no_repeat_ngram_size:
        way += ", penalized"
    if request.processors:
        way += ", processed"
    return way


class KeptCosts:
    """A ``PassCost`` for each way of choosing; a file of them is a prior for the next run.

    A file that is no such file, or cannot be written, does no harm: costs are learned anew. It is
    written after every few hundred passes, atomically. Shared by threads.

    Args:
        row_share: prior cost of one more row, as a share of a one-row pass.
        path: the file, of one model on one device; without it nothing is kept.
    """

    def __init__(self, row_share: float, path: Path | None = None) -> None:
        self.path = path
        self._row_share = row_share
        self._known = _read(path) if path is not None else {}
        self._costs: dict[str, PassCost] = {}
        self._lock = RLock()  # a request that is dropped may be closed anywhere, here too
        self._num_saved = 0

    def of(self, way: str) -> PassCost:
        """Return the costs of one way of choosing; what greedy passes cost is a new one's prior."""
        with self._lock:
            if way not in self._costs:
                known = self._known.get(way) or self._known.get(_GREEDY)
                self._costs[way] = PassCost(self._row_share, known)
            return self._costs[way]

    def replace(self, way: str, seconds: dict[int, float]) -> None:
        """Take measured seconds by rows in place of what was known of one way."""
        with self._lock:
            self._known[way] = dict(seconds)
            self._costs[way] = PassCost(self._row_share, seconds)

    def by_way(self) -> dict[str, dict[int, float]]:
        """Seconds by rows of each way that was seen or known."""
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
        try:
            with replacing(self.path) as file:
                file.write(json.dumps({"format": _FORMAT, "seconds": kept}, indent=1).encode())
        except OSError as error:
            logger.debug("pass costs are not kept: %s", error)
            return False
        return True


def _read(path: Path) -> dict[str, dict[int, float]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            return {}
        return {way: _checked(rows) for way, rows in document["seconds"].items()}
    except Exception:  # learned anew: what it holds is no one's work
        return {}


def _checked(rows: Any) -> dict[int, float]:
    seconds = {int(number): float(value) for number, value in rows.items()}
    if not all(
        0 < number <= _MOST_ROWS and math.isfinite(value) and value > 0
        for number, value in seconds.items()
    ):
        raise ValueError("not a table of seconds by rows")
    return seconds
