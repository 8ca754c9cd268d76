"""Measure retrieval, and sweep its settings.

A question has relevant passages; its *ranks* are their positions, from 1, in the results of a
search. Relevance has no grades. Every figure is for one question; the figure of a set is the mean
over its questions.

There are two sweeps: of fusion (:class:`FusionSweep`) and of passage length (:class:`Cut`). The
best of many settings is partly luck, so settings are chosen by half of the articles, and their gain
over the library's setting is measured on the other half. Halves consist of whole articles
(:attr:`Question.is_held_out`). A setting's worth is the mean over its sets, whatever their size.
``demo`` has too few questions to choose by and is used for that only without data.

Fusion: every question is searched once by vector and once by words, deeply; every setting then
fuses the first results of both. ``scores`` is the library's way
(:func:`ragaccel.retrieval.retriever.fuse`): the weighted sum of cosine and BM25, each scaled to 0
to 1, for several weights and numbers of fused results. ``ranks`` is reciprocal rank fusion (Cormack
et al., 2009): the sum of weight / (offset + rank), for several weights and offsets; an offset of 60
and equal weights are usual.

Passage length: documents are cut to each length and searched with the question. A passage answers
if it contains the whole answer, at its place in the paragraph of the question. Long passages would
contain it more often, so lengths are compared at the same *number of tokens* found, titles
included, as in a prompt: worth is the share of questions whose answer is within a budget of tokens,
averaged over four budgets. With overlap, a passage begins in the middle of the one before; tokens
in two passages count twice.

In ``squad_articles`` a document is the paragraphs of an article, and gold is the short answer.
``clapnq_articles`` has CLAP NQ's passages in the same collection; gold is the sentence that the
long answer repeats most. ``demo`` has the documents and answers that ship.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from argparse import Namespace
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eval import cli
from eval.data import (
    DATA_VARIABLE,
    QUESTION_SETS,
    Question,
    QuestionSet,
    demo_documents,
    demo_questions,
    in_data,
    load_set,
    read_rows,
    spoken_title,
)
from eval.experiments.answers import ANSWERED, answer_figures, answer_row, clapnq_questions
from eval.measure import middle_95, resampled_means, spread
from eval.runner import (
    ResultsLog,
    current_commit,
    note,
    open_results_log,
    result,
)
from ragaccel.passage import Document, Passage
from ragaccel.retrieval import (
    DEFAULT_PASSAGE_TOKENS,
    DENSE_WEIGHT,
    MODES,
    NUM_CANDIDATES,
    Embedder,
    Retriever,
    Store,
    embedded_text,
    fuse,
    load_embedder,
    split_document,
)

Row = dict[str, Any]
Ranking = Sequence[tuple[str, float]]
CountTokens = Callable[[list[str]], list[int]]
Needed = Sequence[int | None]
Values = Mapping[str, Sequence[float]]  # a value for each question, by set
Questions = Mapping[str, Sequence[Question]]
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
    """Index a set in a folder, unless its index exists there, and yield a retriever."""
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


@contextmanager
def index_folder_of(options: Namespace) -> Iterator[Path]:
    """Yield the folder for indexes: that of ``--indexes``, or a temporary one."""
    if options.indexes:
        options.indexes.mkdir(parents=True, exist_ok=True)
        yield options.indexes
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@cli.experiment(
    cli.DATA, cli.THREADS,
    cli.option("--sets", help="comma-separated (default: all of which there is data)"),
    cli.option("--limit", type=int, help="ask only the first questions of a set"),
    cli.option("--sweep", action="store_true", help="which settings are best, instead"),
    cli.option("--indexes", type=Path, help="keep the indexes in this folder"),
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

    ``--sweep`` instead searches the best settings of fusion and of passage length: they are chosen
    by half of the articles and compared with the library's on the other half
    (:class:`FusionSweep`, :class:`Cut`).

    With ``--out`` an interrupted run continues set by set; ``--indexes`` keeps the indexes.
    """
    if options.sweep:
        return sweep(options)
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
    with index_folder_of(options) as folder:
        for name in names:
            if name in done:
                continue
            if name in ANSWERED:
                results_log.add(answer_row(name, options.data))
                continue
            asked = load_set(name, embedder, options.data, options.limit)
            with opened(asked, embedder, folder) as retriever:
                results_log.add(search_row(asked, retriever))
    rows = {row["set"]: row for row in results_log.rows}
    return result(
        "quality",
        settings,
        sets={name: search_figures(rows[name]) for name in names if name not in ANSWERED},
        answers={name: answer_figures(rows[name]) for name in names if name in ANSWERED},
    )


Setting = TypeVar("Setting", bound="Hashable")


def half(values: Sequence[float], questions: Sequence[Question], *, held_out: bool) -> list[float]:
    pairs = zip(values, questions, strict=True)
    return [value for value, question in pairs if question.is_held_out == held_out]


def choose(worth: Mapping[Setting, Values], questions: Questions) -> Setting:
    """Return the setting with the largest mean worth on the half that is not held out."""
    for name, asked in questions.items():
        if len({question.is_held_out for question in asked}) < 2:
            raise ValueError(f"{name}: too few questions to choose by some and judge by others")

    def mean_worth(setting: Setting) -> float:
        means = [
            float(np.mean(half(values, questions[name], held_out=False)))
            for name, values in worth[setting].items()
        ]
        return sum(means) / len(means)

    return max(worth, key=mean_worth)


def gain(ours: Values, theirs: Values, questions: Questions) -> dict[str, Any]:
    """Return the gain of one setting over another on the held-out half, by set and in the mean.

    Each gain is [difference, and the bounds of its 95 % interval over articles].
    """
    by_set, draws, means = {}, [], []
    for name, values in ours.items():
        differences = [a - b for a, b in zip(values, theirs[name], strict=True)]
        kept = half(differences, questions[name], held_out=True)
        groups = [question.group for question in questions[name] if question.is_held_out]
        by_set[name] = spread(kept, groups)
        # another seed for each set, so that their draws are independent
        draws.append(resampled_means(kept, groups, seed=len(draws)))
        means.append(float(np.mean(kept)))
    low, high = middle_95(np.mean(draws, axis=0))
    mean = [round(number, 4) for number in (sum(means) / len(means), low, high)]
    return {"sets": by_set, "mean": mean}


DEPTHS = (10, 20, 50, 100)
OFFSETS = (0, 5, 10, 20, 40, 60, 100)
SHARES = tuple(round(0.1 * tenths, 1) for tenths in range(11))
WORTH = "ndcg@10"


@dataclass(frozen=True, slots=True)
class Fusion:
    """A setting of fusing two rankings; full-text search has the weight 1 - ``dense_weight``."""

    method: str = "scores"
    dense_weight: float = DENSE_WEIGHT
    offset: int | None = None  # for ranks; None fuses scores
    dense_depth: int = NUM_CANDIDATES
    text_depth: int = NUM_CANDIDATES

    def order(self, dense: Ranking, text: Ranking) -> list[str]:
        """Fuse two rankings of (passage id, score), each best first; return the ids in order."""
        dense, text = dense[: self.dense_depth], text[: self.text_depth]
        if self.offset is None:
            fused = fuse(dense, text, self.dense_weight)
        else:
            fused = fuse_ranks(dense, text, self.dense_weight, self.offset)
        return [key for key, _ in fused]


LIBRARY_FUSION = Fusion()
USUAL = Fusion("ranks", 0.5, 60)


def fuse_ranks(
    dense: Ranking, text: Ranking, dense_weight: float, offset: int
) -> list[tuple[str, float]]:
    """Fuse two rankings by reciprocal rank; return (passage id, fused score), best first."""
    scores: dict[str, float] = {}
    for ranking, weight in ((dense, dense_weight), (text, 1 - dense_weight)):
        for rank, (key, _) in enumerate(ranking, 1):
            scores[key] = scores.get(key, 0.0) + weight / (offset + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def ways_swept() -> dict[str, list[Fusion]]:
    """Return the settings to choose from, by the quantity that varies."""
    return {
        "weight": [Fusion(dense_weight=share) for share in SHARES],
        "depths": [Fusion(dense_depth=d, text_depth=t) for d in DEPTHS for t in DEPTHS],
        "reciprocal rank": [Fusion("ranks", share, n) for n in OFFSETS for share in SHARES],
    }


def settings_swept() -> list[Fusion]:
    """Return all distinct settings, the library's first."""
    return list(
        dict.fromkeys((LIBRARY_FUSION, *(one for way in ways_swept().values() for one in way)))
    )


def search_deeply(
    asked: QuestionSet, retriever: Retriever, folder: Path
) -> list[tuple[Ranking, Ranking]]:
    """Search every question of a set in both ways; read earlier searches from ``folder``."""
    settings = {
        "embedder": retriever.embedder.fingerprint,
        "passages": asked.digest,
        "depth": DEPTHS[-1],
    }
    results_log = ResultsLog(folder / f"{asked.name}.rankings.jsonl", settings)
    known = {row["question"]: row for row in results_log.rows}
    for number, question in enumerate(asked.questions):
        if question.text not in known:
            known[question.text] = {
                "question": question.text,
                **_searched(question.text, retriever),
            }
            results_log.add(known[question.text])
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
    """The figures of all fusion settings on all sets that were added."""

    def __init__(self) -> None:
        self.questions: dict[str, Sequence[Question]] = {}
        self.values: dict[Fusion, dict[str, dict[str, list[float]]]] = {}

    def add(self, asked: QuestionSet, found: Sequence[tuple[Ranking, Ranking]]) -> None:
        """Compute every figure of a set for every setting, from its searches ``found``."""
        self.questions[asked.name] = asked.questions
        for setting in settings_swept():
            figures: dict[str, list[float]] = {name: [] for name in METRICS}
            for question, (dense, text) in zip(asked.questions, found, strict=True):
                ranks = ranks_of(question.relevant, setting.order(dense, text))
                for name, metric in METRICS.items():
                    figures[name].append(metric(ranks, len(question.relevant)))
            self.values.setdefault(setting, {})[asked.name] = figures

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield the figures of each setting and set; ``held_out`` is that of the held-out half."""
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
        """Choose settings by the sets ``judging``.

        Return the best settings with their gains over the library's setting, and the gain of that
        over the usual reciprocal rank fusion.
        """
        worth = {setting: self._worth(setting, judging) for setting in self.values}
        questions: Questions = {name: self.questions[name] for name in judging}
        chosen = {}
        for name, way in ways_swept().items():
            best = choose({setting: worth[setting] for setting in way}, questions)
            won = gain(worth[best], worth[LIBRARY_FUSION], questions)
            chosen[name] = {"setting": asdict(best), "gain": won}
        return {
            "by": WORTH,
            "library": asdict(LIBRARY_FUSION),
            "chosen": chosen,
            "usual": asdict(USUAL),
            "library_over_usual": gain(worth[LIBRARY_FUSION], worth[USUAL], questions),
        }

    def _worth(self, setting: Fusion, judging: Sequence[str]) -> Values:
        by_set: Mapping[str, Mapping[str, Sequence[float]]] = self.values[setting]
        return {name: by_set[name][WORTH] for name in judging}


PASSAGE_LENGTHS = (
    32,
    64,
    96,
    128,
    170,
)  # all-MiniLM-L6-v2 sees 254 tokens, a third kept for the title
TOKEN_BUDGETS = (256, 512, 768, 1024)
PASSAGE_DEPTH = 50


@dataclass(frozen=True, slots=True)
class Cut:
    """A setting of cutting documents: maximum tokens of a passage, and whether they overlap."""

    tokens: int = DEFAULT_PASSAGE_TOKENS
    overlap: bool = False

    @property
    def name(self) -> str:
        """Return the setting's name for messages and file names."""
        return f"{self.tokens}-overlapping" if self.overlap else str(self.tokens)

    def passages(self, document: Document, count_tokens: CountTokens) -> list[Passage]:
        """Cut a document into passages with this setting."""
        if not self.overlap:
            return split_document(document, count_tokens, self.tokens)
        return joined(document, split_document(document, count_tokens, self.tokens // 2))


LIBRARY_CUT = Cut()


def cuts_swept() -> list[Cut]:
    return [Cut(tokens, overlap) for overlap in (False, True) for tokens in PASSAGE_LENGTHS]


def joined(document: Document, halves: Sequence[Passage]) -> list[Passage]:
    """Join each passage with the next one under the same heading, to passages that overlap.

    A passage alone under its heading does not change.
    """
    passages = []
    for number, first in enumerate(halves):
        follows = halves[number + 1] if number + 1 < len(halves) else None
        before = halves[number - 1] if number else None
        if follows is not None and follows.title == first.title:
            text = document.text[first.start : follows.end]
            passages.append(replace(first, text=text, end=follows.end))
        elif before is None or before.title != first.title:  # else the one before contains it
            passages.append(first)
    return passages


@dataclass(frozen=True, slots=True)
class ArticleQuestion:
    """A question on an article, and the (start, end) positions of its answer in the document."""

    text: str
    path: str
    places: tuple[tuple[int, int], ...]

    def question(self, passages: Iterable[Passage]) -> Question:
        """Return the question; relevant are its document's passages with a whole answer."""
        own = (
            p.passage_id
            for p in passages
            if any(p.start <= start and end <= p.end for start, end in self.places)
        )
        return Question(self.text, frozenset(own), self.path)


class Articles:
    """Documents made of distinct paragraphs of articles, in the order of :meth:`place`."""

    def __init__(self) -> None:
        self._paragraphs: dict[str, dict[str, int]] = {}  # {path: {paragraph: start}}
        self._lengths: dict[str, int] = {}

    def place(self, title: str, paragraph: str) -> tuple[str, int]:
        """Append a paragraph to its article unless it exists there; return (path, offset)."""
        path = re.sub(r"\W+", "-", title) + ".txt"
        known = self._paragraphs.setdefault(path, {})
        if paragraph not in known:
            known[paragraph] = self._lengths.get(path, 0)
            self._lengths[path] = known[paragraph] + len(paragraph) + len("\n\n")
        return path, known[paragraph]

    def documents(self) -> list[Document]:
        """Return the articles, with an empty line between paragraphs."""
        return [Document(path, "\n\n".join(known)) for path, known in self._paragraphs.items()]


def load_articles(data: Path | None) -> tuple[list[Document], dict[str, list[ArticleQuestion]]]:
    """Return the passages of SQuAD and CLAP NQ as articles, and their questions by set."""
    articles = Articles()
    squad = [
        _asked(articles, row["question"], spoken_title(part["title"]), part["text"], row["answer"])
        for row in read_rows(in_data("rag/squad_like.jsonl", data))
        for part in row["passages"]
    ]
    clapnq = [
        _asked(articles, one.question, one.title, " ".join(one.sentences), one.sentences[one.gold])
        for one in clapnq_questions(in_data("rag", data).parent)
    ]
    asked = {"squad_articles": _once_each(squad), "clapnq_articles": _once_each(clapnq)}
    return articles.documents(), asked


def _asked(
    articles: Articles, question: str, title: str, paragraph: str, answer: str
) -> ArticleQuestion:
    path, offset = articles.place(title, paragraph)
    found = re.finditer(re.escape(answer), paragraph)
    places = tuple((offset + place.start(), offset + place.end()) for place in found)
    return ArticleQuestion(question.strip(), path, places)


def _once_each(asked: Iterable[ArticleQuestion]) -> list[ArticleQuestion]:
    """Return the distinct questions of each article, with the positions of all their answers."""
    places: dict[tuple[str, str], dict[tuple[int, int], None]] = {}
    for one in asked:
        places.setdefault((one.text, one.path), {}).update(dict.fromkeys(one.places))
    return [ArticleQuestion(text, path, tuple(known)) for (text, path), known in places.items()]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents with the questions of one or more sets; each question searches all documents."""

    name: str
    documents: Sequence[Document]
    asked: dict[
        str, list[ArticleQuestion]
    ]  # by set; empty for the demo, whose answers have no positions

    def cut(self, cut: Cut, count_tokens: CountTokens) -> dict[str, QuestionSet]:
        """Return the question sets over the documents cut one way; all share the passages."""
        passages = [p for one in self.documents for p in cut.passages(one, count_tokens)]
        of_path: dict[str, list[Passage]] = {}
        for passage in passages:
            of_path.setdefault(passage.path, []).append(passage)
        questions = {
            name: [one.question(of_path[one.path]) for one in all_]
            for name, all_ in self.asked.items()
        } or {self.name: demo_questions(passages)}
        index = f"{self.name}-{cut.name}"
        return {
            name: QuestionSet(index, tuple(passages), tuple(all_))
            for name, all_ in questions.items()
        }


def demo_corpus() -> Corpus:
    return Corpus("demo", demo_documents(), {})


def articles_corpus(data: Path | None, limit: int | None = None) -> Corpus:
    """Return the corpus of articles with the first ``limit`` questions of each set."""
    documents, asked = load_articles(data)
    return Corpus("articles", documents, {name: all_[:limit] for name, all_ in asked.items()})


def tokens_needed(asked: QuestionSet, retriever: Retriever) -> list[int | None]:
    """Return each question's number of tokens found up to the end of its first right passage.

    None stands for a question without a right passage among those found.
    """
    texts = [embedded_text(passage) for passage in asked.passages]
    counts = retriever.embedder.count_tokens(texts)
    size = {p.passage_id: count for p, count in zip(asked.passages, counts, strict=True)}
    needed: list[int | None] = []
    for question in asked.questions:
        found = [p.passage_id for p in retriever.search(question.text, PASSAGE_DEPTH)]
        first = next((i for i, name in enumerate(found) if name in question.relevant), None)
        needed.append(None if first is None else sum(size[name] for name in found[: first + 1]))
    return needed


def within(needed: Needed, budget: int) -> list[float]:
    """Return for each question 1 if its answer was within ``budget`` tokens, else 0."""
    return [float(tokens is not None and tokens <= budget) for tokens in needed]


def share_within(needed: Needed) -> list[float]:
    """Return for each question the share of the token budgets that included its answer."""
    return np.mean([within(needed, budget) for budget in TOKEN_BUDGETS], axis=0).tolist()


def passage_row(name: str, asked: QuestionSet, retriever: Retriever, cut: Cut) -> Row:
    """Search a set's questions in documents cut one way; return the row for the results log."""
    return {
        "set": name,
        **asdict(cut),
        "passages": len(asked.passages),
        "needed": tokens_needed(asked, retriever),
    }


def grid_entry(row: Row) -> Row:
    """Return the result's figures of one cut and set, from its row."""
    needed = row["needed"]
    return {
        "sweep": "passages",
        **{key: value for key, value in row.items() if key != "needed"},
        **{f"within_{n}": round(float(np.mean(within(needed, n))), 4) for n in TOKEN_BUDGETS},
        "worth": round(float(np.mean(share_within(needed))), 4),
    }


def passages_verdict(rows: Iterable[Row], questions: Questions) -> dict[str, Any]:
    """Return the best cut by the sets of ``questions``, and its gain over the library's."""
    values: dict[Cut, dict[str, list[float]]] = {}
    for row in rows:
        if row["set"] in questions:
            cut = Cut(row["tokens"], row["overlap"])
            values.setdefault(cut, {})[row["set"]] = share_within(row["needed"])
    best = choose(values, questions)
    found = {"setting": asdict(best), "gain": gain(values[best], values[LIBRARY_CUT], questions)}
    return {"by": "worth", "library": asdict(LIBRARY_CUT), "chosen": {"length and overlap": found}}


KIND = "quality_sweep"


def sweep(options: Namespace) -> dict[str, Any]:
    """Run both sweeps; return the result with all settings' figures and the chosen settings."""
    names = sets_at_hand(options, QUESTION_SETS, ("demo",))
    embedder = remembering_embedder()
    settings = {
        "sets": names,
        "limit": options.limit,
        "depths": list(DEPTHS),
        "lengths": list(PASSAGE_LENGTHS),
        "budgets": list(TOKEN_BUDGETS),
        "embedder": embedder.fingerprint[:12],
        "commit": current_commit(),
    }
    results_log = open_results_log(options.out, {"kind": KIND, **settings})
    judging = [name for name in names if name != "demo"] or names
    with index_folder_of(options) as folder:
        fusion = FusionSweep()
        for name in names:
            asked = load_set(name, embedder, options.data, options.limit)
            with opened(asked, embedder, folder) as retriever:
                fusion.add(asked, search_deeply(asked, retriever, folder))
        corpora = [demo_corpus()]
        if "squad" in names and "clapnq" in names:
            corpora.append(articles_corpus(options.data, options.limit))
        questions = {}
        for corpus in corpora:
            questions |= _sweep_passages(corpus, embedder, folder, results_log)
    by_people = {name: asked for name, asked in questions.items() if name != "demo"} or questions
    grid = [*fusion.grid(), *map(grid_entry, results_log.rows)]
    # the run is `eval quality`, also for the recorded command
    document = result("quality", settings, grid=grid)
    document["fusion"] = fusion.verdict(judging)
    document["passages"] = passages_verdict(results_log.rows, by_people)
    return {**document, "kind": KIND}


def _sweep_passages(
    corpus: Corpus, embedder: Embedder, folder: Path, results_log: ResultsLog
) -> dict[str, Sequence[Any]]:
    """Search a corpus cut in every way that the results log lacks; return questions by set."""
    questions: dict[str, Sequence[Any]] = {}
    for cut in cuts_swept():
        sets = corpus.cut(cut, embedder.count_tokens)
        questions = {name: asked.questions for name, asked in sets.items()}
        known = {(row["set"], row["tokens"], row["overlap"]) for row in results_log.rows}
        if all((name, cut.tokens, cut.overlap) in known for name in sets):
            continue
        rows = []
        for name, asked in sets.items():
            with opened(asked, embedder, folder) as retriever:
                rows.append(passage_row(name, asked, retriever, cut))
        note(f"{corpus.name}, {cut.name} tokens a passage: done")
        results_log.add(*rows)
    return questions
