"""Below which similarity is a question refused: ``python -m eval.floor --data FOLDER``.

The bundled reader quotes a sentence of any passages that it is given. What tells a question that
they answer from one that they do not is how near their nearest sentence is to it, by the bundled
embedder. This asks development questions of the passages that hold the answer (``answerable``), of
those of all other articles (``other articles``: the same set of passages without the article that
the question is about) and of another collection (``other collection``), and counts how many of each
fall below a floor. The floor is the highest that loses at most ``--lost`` of the answerable ones in
no set; ``ragaccel.quotes.FLOOR`` is what was found.

Development: half of the articles (``question_sets``), less those that the reader is judged by.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.question_sets import Question, QuestionSet, load_set, spoken_title
from eval.script import in_folder, measured, new_parser, note, result
from ragaccel import Retriever, Store, load_embedder
from ragaccel.retrieval.compression import nearest_sentences
from recipes.reader.corpus import load_questions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel.passage import Passage
    from ragaccel.retrieval.embedder import Embedder

_SETS = ("squad", "nq", "demo")
_OTHER = {"squad": "demo", "nq": "squad", "demo": "nq"}
_FOUND = 6  # passages that a question is answered from
_DEPTH = 40  # looked through for passages of other articles
_GRID = [n / 100 for n in range(71)]
ANSWERABLE, OTHER_ARTICLES, OTHER_COLLECTION = "answerable", "other articles", "other collection"


def main() -> None:
    parser = new_parser("floor", __doc__ or "")
    parser.add_argument("--data", type=Path, help="the question sets; RAGACCEL_DATA by default")
    parser.add_argument("--sets", nargs="+", default=list(_SETS), choices=_SETS)
    parser.add_argument("--count", type=int, default=300, help="questions of each set")
    parser.add_argument("--passages", type=int, default=1500, help="most passages of a set")
    parser.add_argument("--lost", type=float, default=0.02, help="share of answerable ones")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.out = in_folder(options.out, "floor.json")
    print(json.dumps(measured("floor", _measure, options)["floor"]))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    embedder = load_embedder()
    sets = {
        name: _development(load_set(name, embedder, options.data), options) for name in options.sets
    }
    scores: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        retrievers = dict(_indexed(sets, embedder, Path(folder)))
        for name, asked in sets.items():
            note(f"{len(asked.questions)} questions of {name}")
            other = retrievers.get(_OTHER[name])
            scores[name] = _scores(asked, retrievers[name], other, embedder)
    floor = fit_floor([kinds[ANSWERABLE] for kinds in scores.values()], options.lost)
    settings = {"count": options.count, "passages": options.passages, "lost": options.lost}
    return result(
        "floor",
        settings,
        floor=floor,
        questions={name: {kind: len(of) for kind, of in k.items()} for name, k in scores.items()},
        below_floor={
            name: {kind: share_below(of, floor) for kind, of in kinds.items() if of}
            for name, kinds in scores.items()
        },
        curves={
            name: {kind: [share_below(of, at) for at in _GRID] for kind, of in kinds.items() if of}
            for name, kinds in scores.items()
        },
        grid=_GRID,
    )


def fit_floor(answerable: Sequence[Sequence[float]], lost: float) -> float:
    """Find the highest floor of the grid that loses at most a share of the answerable of any set.

    Args:
        answerable: The similarities of the questions of each set.
        lost: The share.
    """
    fits = [at for at in _GRID if all(share_below(of, at) <= lost for of in answerable)]
    return max(fits)


def share_below(scores: Sequence[float], floor: float) -> float:
    """Tell which share of similarities is below a floor."""
    return round(sum(score < floor for score in scores) / max(1, len(scores)), 4)


def _development(whole: QuestionSet, options: argparse.Namespace) -> QuestionSet:
    """Keep development questions, drawn alike each time, and passages: theirs, then others."""
    judged = set()
    if whole.name != "demo":
        judged = {spoken_title(q.title) for q in load_questions(_data(options)) if q.held_out}
    questions = [
        q for q in whole.questions if not q.is_held_out and spoken_title(q.group) not in judged
    ]
    random.Random(0).shuffle(questions)
    questions = questions[: options.count]
    wanted = {key for question in questions for key in question.relevant}
    passages = sorted(whole.passages, key=lambda passage: passage.passage_id not in wanted)
    kept = passages[: max(len(wanted), options.passages)]
    return QuestionSet(whole.name, tuple(kept), tuple(questions))


def _data(options: argparse.Namespace) -> Path:
    from eval.examples import in_data

    return in_data("rag", options.data).parent


def _indexed(
    sets: dict[str, QuestionSet], embedder: Embedder, folder: Path
) -> Iterator[tuple[str, Retriever]]:
    for name, asked in sets.items():
        note(f"{len(asked.passages)} passages of {name}")
        store = Store(folder / f"{name}.db")
        asked.index(store, embedder, folder)
        yield name, Retriever(store, embedder)


def _scores(
    asked: QuestionSet, own: Retriever, other: Retriever | None, embedder: Embedder
) -> dict[str, list[float]]:
    """Measure the similarity of each question to the nearest sentence, in three collections."""
    scores: dict[str, list[float]] = {ANSWERABLE: [], OTHER_ARTICLES: [], OTHER_COLLECTION: []}
    for question in asked.questions:
        ranked = own.search(question.text, _DEPTH)
        kinds = {ANSWERABLE: ranked, OTHER_ARTICLES: _elsewhere(ranked, question)}
        if other is not None:
            kinds[OTHER_COLLECTION] = other.search(question.text, _FOUND)
        if not question.relevant & {passage.passage_id for passage in ranked[:_FOUND]}:
            del kinds[ANSWERABLE]  # it is not, from these
        for kind, passages in kinds.items():
            nearest = nearest_sentences(embedder, question.text, passages[:_FOUND])
            if nearest:
                scores[kind].append(nearest[0].score)
    return scores


def _elsewhere(passages: Sequence[Passage], question: Question) -> list[Passage]:
    """Leave out passages that answer, and all of the article that the question is about."""
    group = spoken_title(question.group)
    return [
        passage
        for passage in passages
        if passage.passage_id not in question.relevant
        and group not in (spoken_title(passage.title), passage.path)
    ]


if __name__ == "__main__":
    main()
