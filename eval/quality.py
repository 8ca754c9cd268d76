"""Is retrieval any good: ``python -m eval.quality --data FOLDER --out quality.json``.

Hit rate, MRR, nDCG and recall of dense, full-text and fused search, for every question of every set
of :mod:`eval.question_sets`, as :meth:`Retriever.search` finds passages by default; what fused
search gains over the other two, question by question; and exact match, F1 and containment of what
the bundled reader answers (``answers_held_out``: people's questions on XQuAD articles that it was
not trained on; ``answers_demo``). Without data, the sets that ship. Intervals hold 95 % of the
means of other draws of articles.

``--sweep`` asks instead which settings of fusion and of passage length are best: those are chosen
by half of the articles and compared with the library's on the other half (:mod:`eval.fusion_sweep`,
:mod:`eval.passage_sweep`).

With ``--out`` a run that was stopped goes on, set by set; with ``--indexes`` it keeps the indexes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.answer_quality import ANSWERED, answer_figures, answer_row
from eval.examples import DATA_VARIABLE
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.question_sets import SETS, load_set
from eval.rankings import DEPTH, METRICS, ranks_of
from eval.ratios import spread
from eval.script import measured, new_parser, note, result
from ragaccel.retrieval.embedder import load_embedder
from ragaccel.retrieval.retriever import MODES, Retriever
from ragaccel.retrieval.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eval.question_sets import QuestionSet
    from ragaccel.retrieval.embedder import Embedder

    Row = dict[str, Any]

SHIPPED = ("demo", "answers_demo")
_TOLD_EVERY = 500


def remembering_embedder() -> Embedder:
    """Load the default embedder; what it makes of a question it makes once for all modes."""
    embedder = load_embedder()
    embedder.embed_query = cache(embedder.embed_query)  # type: ignore[method-assign]
    return embedder


@contextmanager
def opened(asked: QuestionSet, embedder: Embedder, folder: Path) -> Iterator[Retriever]:
    """Index a set in a folder, or find it indexed there, and open it for searching."""
    note(f"{asked.name}: {len(asked.passages):,} passages, {len(asked.questions):,} questions")
    with Store(folder / f"{asked.name}.db") as store:
        asked.index(store, embedder, folder)
        yield Retriever(store, embedder)


def search_row(asked: QuestionSet, retriever: Retriever) -> Row:
    """Ask every question of a set in every mode; keep where the relevant passages came."""
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
    """Average a set's figures in each mode, and what fused search gains over the others."""
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
    """Work out every figure of every question, by mode and metric."""
    return {
        mode: {
            name: [metric(*pair) for pair in zip(ranks, row["relevant"], strict=True)]
            for name, metric in METRICS.items()
        }
        for mode, ranks in row["ranks"].items()
    }


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Subtract figures question by question."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every set that is asked for, those in the ledger excepted; lay out their figures."""
    names = sets_at_hand(options, (*SETS, *ANSWERED), SHIPPED)
    embedder = remembering_embedder()
    settings = {
        "sets": names,
        "limit": options.limit,
        "depth": DEPTH,
        "embedder": embedder.fingerprint[:12],
        "commit": current_commit(),  # what search finds is the code's
    }
    ledger = kept_beside(options.out, {"kind": "quality", **settings})
    done = {row["set"] for row in ledger.rows}
    with index_folder_of(options) as folder:
        for name in names:
            if name in done:
                continue
            if name in ANSWERED:
                ledger.add(answer_row(name, options.data))
                continue
            asked = load_set(name, embedder, options.data, options.limit)
            with opened(asked, embedder, folder) as retriever:
                ledger.add(search_row(asked, retriever))
    rows = {row["set"]: row for row in ledger.rows}
    return result(
        "quality",
        settings,
        sets={name: search_figures(rows[name]) for name in names if name not in ANSWERED},
        answers={name: answer_figures(rows[name]) for name in names if name in ANSWERED},
    )


def sets_at_hand(
    options: argparse.Namespace, known: Sequence[str], shipped: Sequence[str]
) -> list[str]:
    """The sets that are asked for, or all of which there is data.

    Raises:
        ValueError: One is not known; names those that are.
    """
    if options.sets:
        unknown = set(options.sets.split(",")) - set(known)
        if unknown:
            raise ValueError(f"no set {', '.join(sorted(unknown))}: take of {', '.join(known)}")
        return options.sets.split(",")
    if options.data or DATA_VARIABLE in os.environ:
        return list(known)
    note(f"no data folder (--data or {DATA_VARIABLE}): only what ships, {', '.join(shipped)}")
    return list(shipped)


@contextmanager
def index_folder_of(options: argparse.Namespace) -> Iterator[Path]:
    """The folder that indexes are kept in, or one that is gone at the end."""
    if options.indexes:
        options.indexes.mkdir(parents=True, exist_ok=True)
        yield options.indexes
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.sweep:
        from eval.quality_sweep import sweep  # which asks for what is above

        document = measured("quality", sweep, options)
    else:
        document = measured("quality", measure, options)
    print(json.dumps(document))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("quality", __doc__ or "")
    add = parser.add_argument
    add("--data", type=Path, help=f"the data folder (or {DATA_VARIABLE})")
    add("--sets", help="comma-separated; all of which there is data if not given")
    add("--limit", type=int, help="ask only the first questions of a set")
    add("--sweep", action="store_true", help="which settings are best, instead")
    add("--indexes", type=Path, help="keep the indexes in this folder")
    add("--threads", type=int)
    add("--out", type=Path, help="write the document there; rows beside it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
