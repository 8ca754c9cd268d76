"""Measure retrieval.

A question has relevant passages; its *ranks* are their positions, from 1, in the results of a
search. Relevance has no grades. Every figure is for one question; the figure of a set is the mean
over its questions.
"""

from __future__ import annotations

import math
import os
import tempfile
from argparse import Namespace
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from eval import cli
from eval.data import (
    DATA_VARIABLE,
    QUESTION_SETS,
    QuestionSet,
    load_set,
)
from eval.experiments.answers import ANSWERED, answer_figures, answer_row
from eval.measure import spread
from eval.runner import (
    current_commit,
    note,
    open_results_log,
    result,
)
from ragaccel.retrieval import (
    MODES,
    Embedder,
    Retriever,
    Store,
    load_embedder,
)

Row = dict[str, Any]
Metric = Callable[[Sequence[int], int], float]

DEPTH = 10


def ranks_of(relevant: Collection[str], found: Sequence[str]) -> list[int]:
    """Return the positions, from 1, of the relevant passages among the found ones, ascending."""
    return [rank for rank, name in enumerate(found, 1) if name in relevant]


def hit(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:  # noqa: ARG001
    """Return 1 if a relevant passage is among the first ``depth`` results, else 0."""
    return float(any(rank <= depth for rank in ranks))


def recall(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:
    """Return the share of the relevant passages that are among the first ``depth`` results."""
    return sum(rank <= depth for rank in ranks) / num_relevant if num_relevant else 0.0


def reciprocal_rank(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:  # noqa: ARG001
    """Return 1 / the first relevant passage's rank, or 0 if that rank exceeds ``depth``."""
    first = min(ranks, default=depth + 1)
    return 1 / first if first <= depth else 0.0


def ndcg(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:
    """Return the discounted gain, sum of 1 / log2(1 + rank), over that of the best order."""
    best = sum(1 / math.log2(1 + rank) for rank in range(1, min(num_relevant, depth) + 1))
    gained = sum(1 / math.log2(1 + rank) for rank in ranks if rank <= depth)
    return gained / best if best else 0.0


METRICS: Mapping[str, Metric] = {
    "hit@1": partial(hit, depth=1),
    "hit@3": partial(hit, depth=3),
    "hit@6": partial(hit, depth=6),
    "hit@10": hit,
    "mrr@10": reciprocal_rank,
    "ndcg@10": ndcg,
    "recall@10": recall,
}


SHIPPED = ("demo", "answers_demo")
_TOLD_EVERY = 500


def remembering_embedder() -> Embedder:
    """Load the default embedder with a cache of questions, which several modes share."""
    embedder = load_embedder()
    embedder.embed_query = cache(embedder.embed_query)  # type: ignore[method-assign]
    return embedder


@contextmanager
def opened(asked: QuestionSet, embedder: Embedder, folder: Path) -> Iterator[Retriever]:
    """Index a set in a folder, and yield a retriever."""
    note(f"{asked.name}: {len(asked.passages):,} passages, {len(asked.questions):,} questions")
    with Store(folder / f"{asked.name}.db") as store:
        asked.index(store, embedder, folder)
        yield Retriever(store, embedder)


def search_row(asked: QuestionSet, retriever: Retriever) -> Row:
    """Search every question of a set in every mode; return a row with the relevant ranks."""
    ranks: dict[str, list[list[int]]] = {mode: [] for mode in MODES}
    for number, question in enumerate(asked.questions):
        if number and number % _TOLD_EVERY == 0:
            note(f"{asked.name}: {number:,} questions asked")
        for mode in MODES:
            found = retriever.search(question.text, DEPTH, mode=mode)
            ranks[mode].append(ranks_of(question.relevant, [p.passage_id for p in found]))
    return {
        "set": asked.name,
        "passages": len(asked.passages),
        "relevant": [len(question.relevant) for question in asked.questions],
        "groups": [question.group for question in asked.questions],
        "ranks": ranks,
    }


def search_figures(row: Row) -> dict[str, Any]:
    """Return a set's mean figures by mode, and the gains of fused search over other modes."""
    groups, values = row["groups"], values_of(row)
    fused = values["fused"]
    gains = {
        mode: {name: spread(differences(fused[name], values[mode][name]), groups) for name in fused}
        for mode in values
        if mode != "fused"
    }
    return {
        "passages": row["passages"],
        "questions": len(groups),
        "groups": len(set(groups)),
        "relevant": sum(row["relevant"]) / len(groups),
        "modes": {
            mode: {name: spread(figures, groups) for name, figures in by_name.items()}
            for mode, by_name in values.items()
        },
        "fused_over": gains,
    }


def values_of(row: Row) -> dict[str, dict[str, list[float]]]:
    """Return each question's figures by mode and metric."""
    return {
        mode: {
            name: [metric(*pair) for pair in zip(ranks, row["relevant"], strict=True)]
            for name, metric in METRICS.items()
        }
        for mode, ranks in row["ranks"].items()
    }


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the differences of two lists of figures, question by question."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def sets_at_hand(options: Namespace, known: Sequence[str], shipped: Sequence[str]) -> list[str]:
    """Return the names of the requested sets, or of all sets that have data."""
    if options.sets:
        unknown = set(options.sets.split(",")) - set(known)
        if unknown:
            raise ValueError(f"no set {', '.join(sorted(unknown))}: take of {', '.join(known)}")
        return options.sets.split(",")
    if options.data or DATA_VARIABLE in os.environ:
        return list(known)
    note(f"no data folder (--data or {DATA_VARIABLE}): only what ships, {', '.join(shipped)}")
    return list(shipped)


@cli.experiment(
    cli.DATA, cli.THREADS,
    cli.option("--sets", help="comma-separated (default: all of which there is data)"),
    cli.option("--limit", type=int, help="ask only the first questions of a set"),
)  # fmt: skip
def run_quality(options: Namespace) -> dict[str, Any]:
    """Quality of retrieval: ``python -m eval quality --data FOLDER --out quality.json``.

    The figures are hit rate, MRR, nDCG and recall of dense, full-text and fused search, for every
    question of every set (:class:`eval.data.QuestionSet`), with the defaults of
    :meth:`Retriever.search`; the gains of fused search over the other two, question by question;
    and exact match, F1 and containment of the bundled reader's answers (``answers_held_out``:
    people's questions on XQuAD articles that it was not trained on; ``answers_demo``). Without data
    only the sets that ship are measured. Intervals contain 95 % of the bootstrap means over
    articles.

    With ``--out`` an interrupted run continues set by set.
    """
    names = sets_at_hand(options, (*QUESTION_SETS, *ANSWERED), SHIPPED)
    embedder = remembering_embedder()
    settings = {
        "sets": names,
        "limit": options.limit,
        "depth": DEPTH,
        "embedder": embedder.fingerprint[:12],
        "commit": current_commit(),  # results depend on the code
    }
    results_log = open_results_log(options.out, {"kind": "quality", **settings})
    done = {row["set"] for row in results_log.rows}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in done:
                continue
            if name in ANSWERED:
                results_log.add(answer_row(name, options.data))
                continue
            asked = load_set(name, embedder, options.data, options.limit)
            with opened(asked, embedder, Path(folder)) as retriever:
                results_log.add(search_row(asked, retriever))
    rows = {row["set"]: row for row in results_log.rows}
    return result(
        "quality",
        settings,
        sets={name: search_figures(rows[name]) for name in names if name not in ANSWERED},
        answers={name: answer_figures(rows[name]) for name in names if name in ANSWERED},
    )
