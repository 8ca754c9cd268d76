"""Which fusion of dense and full-text search is best; part of ``python -m eval.quality --sweep``.

Every question is searched once in each of the two ways, deeply; every setting then fuses what came
first in both. ``scores`` is the library's way (:func:`ragaccel.retrieval.retriever.fuse`): the
weighted sum of cosine and BM25, each brought to 0 to 1; over weights, and over how many of each
search are fused at all. ``ranks`` is reciprocal rank fusion (Cormack et al., 2009): the sum of
weight / (offset + rank), over weights and offsets; 60 and equal weights are what is usual.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.choosing import choose, gain, half
from eval.ledger import Ledger
from eval.rankings import METRICS, ranks_of
from eval.script import note
from ragaccel.retrieval.retriever import DENSE_WEIGHT, NUM_CANDIDATES, fuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from eval.choosing import Questions, Values
    from eval.question_sets import Question, QuestionSet
    from ragaccel.retrieval.retriever import Retriever

    Ranking = Sequence[tuple[str, float]]

DEPTHS = (10, 20, 50, 100)
OFFSETS = (0, 5, 10, 20, 40, 60, 100)
SHARES = tuple(round(0.1 * tenths, 1) for tenths in range(11))
WORTH = "ndcg@10"
_TOLD_EVERY = 500


@dataclass(frozen=True, slots=True)
class Fusion:
    """How two rankings become one; ``dense_weight`` is of 1, the rest is full-text search's."""

    method: str = "scores"
    dense_weight: float = DENSE_WEIGHT
    offset: int | None = None  # of ranks
    dense_depth: int = NUM_CANDIDATES
    text_depth: int = NUM_CANDIDATES

    def order(self, dense: Ranking, text: Ranking) -> list[str]:
        """Fuse two rankings of (passage id, score), each best first."""
        dense, text = dense[: self.dense_depth], text[: self.text_depth]
        if self.offset is None:
            fused = fuse(dense, text, self.dense_weight)
        else:
            fused = fuse_ranks(dense, text, self.dense_weight, self.offset)
        return [key for key, _ in fused]


LIBRARY = Fusion()
USUAL = Fusion("ranks", 0.5, 60)


def fuse_ranks(
    dense: Ranking, text: Ranking, dense_weight: float, offset: int
) -> list[tuple[str, float]]:
    """Fuse two rankings by reciprocal rank."""
    scores: dict[str, float] = {}
    for ranking, weight in ((dense, dense_weight), (text, 1 - dense_weight)):
        for rank, (key, _) in enumerate(ranking, 1):
            scores[key] = scores.get(key, 0.0) + weight / (offset + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def ways_swept() -> dict[str, list[Fusion]]:
    """The settings among which one is chosen, by what is varied."""
    return {
        "weight": [Fusion(dense_weight=share) for share in SHARES],
        "depths": [Fusion(dense_depth=d, text_depth=t) for d in DEPTHS for t in DEPTHS],
        "reciprocal rank": [Fusion("ranks", share, n) for n in OFFSETS for share in SHARES],
    }


def settings_swept() -> list[Fusion]:
    """Every setting once, the library's first."""
    return list(dict.fromkeys((LIBRARY, *(one for way in ways_swept().values() for one in way))))


def search_deeply(
    asked: QuestionSet, retriever: Retriever, folder: Path
) -> list[tuple[Ranking, Ranking]]:
    """Search every question of a set in both ways; what was searched before is read again.

    Raises:
        ValueError: The folder holds searches of other passages or by another embedder.
    """
    settings = {
        "embedder": retriever.embedder.fingerprint,
        "passages": asked.digest,
        "depth": DEPTHS[-1],
    }
    ledger = Ledger(folder / f"{asked.name}.rankings.jsonl", settings)
    known = {row["question"]: row for row in ledger.rows}
    for number, question in enumerate(asked.questions):
        if question.text not in known:
            known[question.text] = {
                "question": question.text,
                **_searched(question.text, retriever),
            }
            ledger.add(known[question.text])
        if number and number % _TOLD_EVERY == 0:
            note(f"{asked.name}: {number:,} questions asked")
    rows = [known[question.text] for question in asked.questions]
    return [(row["dense"], row["text"]) for row in rows]


def _searched(text: str, retriever: Retriever) -> dict[str, list[tuple[str, float]]]:
    return {
        mode: [
            (passage.passage_id, round(passage.score, 5))
            for passage in retriever.search(text, DEPTHS[-1], mode=mode)
        ]
        for mode in ("dense", "text")
    }


class FusionSweep:
    """The figures of every setting on every set, as sets are added."""

    def __init__(self) -> None:
        self.questions: dict[str, Sequence[Question]] = {}
        self.values: dict[Fusion, dict[str, dict[str, list[float]]]] = {}

    def add(self, asked: QuestionSet, found: Sequence[tuple[Ranking, Ranking]]) -> None:
        """Work out every figure of a set by every setting."""
        self.questions[asked.name] = asked.questions
        for setting in settings_swept():
            figures: dict[str, list[float]] = {name: [] for name in METRICS}
            for question, (dense, text) in zip(asked.questions, found, strict=True):
                ranks = ranks_of(question.relevant, setting.order(dense, text))
                for name, metric in METRICS.items():
                    figures[name].append(metric(ranks, len(question.relevant)))
            self.values.setdefault(setting, {})[asked.name] = figures

    def grid(self) -> Iterator[dict[str, Any]]:
        """One entry a setting and set; ``held_out`` is of the half that chooses nothing."""
        for setting, by_set in self.values.items():
            for name, figures in by_set.items():
                kept = half(figures[WORTH], self.questions[name], held_out=True)
                yield {
                    "sweep": "fusion",
                    "set": name,
                    **asdict(setting),
                    **{metric: round(float(np.mean(v)), 4) for metric, v in figures.items()},
                    "held_out": round(float(np.mean(kept)), 4) if kept else None,
                }

    def verdict(self, judging: Sequence[str]) -> dict[str, Any]:
        """What is chosen by some sets and gains over the library's; and that over the usual."""
        worth = {setting: self._worth(setting, judging) for setting in self.values}
        questions: Questions = {name: self.questions[name] for name in judging}
        chosen = {}
        for name, way in ways_swept().items():
            best = choose({setting: worth[setting] for setting in way}, questions)
            won = gain(worth[best], worth[LIBRARY], questions)
            chosen[name] = {"setting": asdict(best), "gain": won}
        return {
            "by": WORTH,
            "library": asdict(LIBRARY),
            "chosen": chosen,
            "usual": asdict(USUAL),
            "library_over_usual": gain(worth[LIBRARY], worth[USUAL], questions),
        }

    def _worth(self, setting: Fusion, judging: Sequence[str]) -> Values:
        by_set: Mapping[str, Mapping[str, Sequence[float]]] = self.values[setting]
        return {name: by_set[name][WORTH] for name in judging}
