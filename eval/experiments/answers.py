"""Evaluate the bundled reader: its answers, alone and after retrieval, and its refusals.

The figures are exact match, F1 and containment. Texts are compared in lower case, without
punctuation and the articles *a*, *an* and *the* (Rajpurkar et al., 2016). A reader that quotes
whole sentences rarely matches a short answer exactly, so containment says whether its text contains
the answer.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import string
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import cli
from eval.data import (
    DEMOS,
    SENTENCE_FILES,
    Question,
    QuestionSet,
    in_data,
    load_set,
    plain,
    read_rows,
    spoken_title,
)
from eval.measure import spread
from eval.runner import ResultsLog, note, open_results_log, result, write_whole
from ragaccel import LLM, RAG, CompressingRetriever, Retriever, Store, index_folder, load_embedder
from ragaccel.passage import Passage, split_sentences
from ragaccel.rag import check_quote, holds_what_is_asked, share_of_words
from ragaccel.retrieval import Embedder, nearest_sentences
from recipes.reader.corpus import HumanQuestion, detokenized, load_articles, load_questions, rows_of
from recipes.reader.evaluate import evaluate
from recipes.reader.examples import ExampleMaker

READER = Path(__file__).parents[2] / "ragaccel" / "models" / "reader"


def clapnq_questions(data: Path) -> list[HumanQuestion]:
    """Return CLAP NQ's questions; the right sentence is the one the long answer repeats most."""
    questions = []
    for row in rows_of(data / "rag" / "clapnq_dev.jsonl"):
        passage = row["passages"][0]
        sentences = tuple(split_sentences(detokenized(passage["text"])))
        said = set(re.findall(r"\w+", row["answer"].lower()))
        shares = []
        for sentence in sentences:
            words = re.findall(r"\w+", sentence.lower())
            repeated = sum(word in said for word in words)
            shares.append(repeated * repeated / max(1, len(words)))
        if sentences:
            gold = shares.index(max(shares))
            questions.append(
                HumanQuestion(row["question"], passage["title"], sentences, gold, "clapnq", True)
            )
    return questions


@cli.experiment(
    cli.DATA,
    cli.option("--reader", default=str(READER), help="folder of the reader"),
    cli.integer("--examples", 400, "questions of each kind"),
    shown=("figures",),
)
def run_reader(options: Namespace) -> dict[str, Any]:
    """Evaluate the bundled reader on unseen documents: ``python -m eval reader --data FOLDER``.

    There are two kinds of prompt. One has four whole passages: the right one (missing in the
    twelfth of cases that is unanswerable) and distractors that share an article or words with the
    question, half of the time ordered by shared words, else at random. The other has six passages
    as the default retriever finds them, always with the right one, each cut to the sentence nearest
    to the question.

    The question sets are ``made``: generated from sentences of held-out documents; ``squad``: XQuAD
    articles not trained on; ``nq``: Natural Questions on passages not trained on; and ``clapnq``:
    CLAP NQ, where the right sentence is the one most repeated by the recorded long answer.
    """
    data = in_data("text", options.data).parent
    tokenizer = AutoTokenizer.from_pretrained(options.reader)
    model = AutoModelForCausalLM.from_pretrained(options.reader)
    articles = [article for article in load_articles(data) if article.held_out]
    questions = [question for question in load_questions(data) if question.held_out]
    questions += clapnq_questions(data)
    maker = ExampleMaker(articles, questions, tokenizer, seed=1, embedder=load_embedder())
    return result(
        "reader",
        {"examples": options.examples},
        figures=evaluate(model, maker, examples=options.examples),
        parameters=sum(p.numel() for p in model.parameters()),
    )


REFUSAL = "The passages do not tell."


def is_right(answer: str, expected: str | None) -> bool:
    """Return whether an answer is right for a question's expected answer (None: a refusal)."""
    said = plain(answer)
    if expected is None:
        return said == REFUSAL
    wanted = plain(expected)
    return wanted in said or (len(said) >= 40 and said in wanted)


def write_held_out(data: Path, folder: Path) -> list[dict[str, str | None]]:
    """Write each held-out XQuAD article as a file; return the questions about them."""
    articles: dict[str, dict[str, None]] = {}
    questions: list[dict[str, str | None]] = []
    for asked in load_questions(data):
        if not asked.held_out or asked.source != "squad":
            continue
        file = re.sub(r"\W+", "-", asked.title) + ".txt"
        articles.setdefault(file, {})[" ".join(asked.sentences)] = None
        answer = asked.sentences[asked.gold]
        questions.append(
            {"question": asked.question, "answer": answer, "file": file, "words": asked.answer}
        )
    for file, passages in articles.items():
        (folder / file).write_text("\n\n".join(passages) + "\n", encoding="utf-8")
    return questions


@cli.experiment(
    cli.option("--held-out", action="store_true", help="ask about held-out XQuAD articles instead"),
    cli.DATA,
    cli.option("--model", help="folder or hub name; without one, the bundled reader"),
    cli.option("--questions", type=Path, default=DEMOS / "questions.jsonl", help="JSON lines"),
    cli.option("--folder", type=Path, default=DEMOS / "documents", help="the documents"),
    cli.option("-k", type=int, default=6, help="passages a question"),
    cli.integer("--sentences", 1, "sentences a passage is cut to; 0: whole passages"),
    cli.option("--margin", type=float, default=0.05, help="how much lower a passage may score"),
    cli.option("--unchecked", action="store_true", help="what the reader says, quote or not"),
    shown=("figures",),
)
def run_questions(options: Namespace) -> dict[str, Any]:
    """Answer the demo's questions on its documents: ``python -m eval questions``.

    An answer is right if it contains the expected sentence, or for a table at least 40 characters
    of the right row; white space and citations are ignored. An unanswerable question must be
    refused. ``cited`` counts answers whose citation names a passage of the right file, and
    ``right_nearest`` those that are right or refused with the right sentence among the three
    nearest, which a refusal shows.

    ``--held-out`` asks people's questions on the XQuAD articles that the reader was not trained on,
    with one file for each article: ``python -m eval questions --held-out --data FOLDER``.
    """
    rows = answers_to_all(options)
    if options.out:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out.with_suffix(".rows.jsonl"), "".join(lines))
    given = ("held_out", "model", "k", "sentences", "margin", "unchecked")
    settings = {name: getattr(options, name) for name in given}
    return result("questions", settings, figures=figures_of(rows))


def answers_to_all(options: Namespace) -> list[dict[str, Any]]:
    """Ask the questions that the options choose, on their documents; return judged answers."""
    with tempfile.TemporaryDirectory() as folder:
        documents = options.folder
        if options.held_out:
            documents = Path(folder)
            questions = write_held_out(in_data("rag", options.data).parent, documents)
        else:
            questions = list(read_rows(options.questions))
        return ask_all(
            questions,
            documents,
            model=options.model,
            k=options.k,
            sentences=options.sentences,
            margin=options.margin,
            check_quotes=not options.unchecked,
        )


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of right, wrong, cited and refused answers, from judged answers."""
    answerable = [row for row in rows if row["expected"] is not None]
    refusable = [row for row in rows if row["expected"] is None]
    return {
        "right": sum(row["right"] for row in answerable),
        "wrong": sum(not row["right"] and row["answered"] for row in answerable),
        "right_nearest": sum(row["right"] or row["nearest"] for row in answerable),
        "cited": sum(row["cited"] for row in answerable),
        "retrieved": sum(row["retrieved"] for row in answerable),
        "answerable": len(answerable),
        "refused": sum(row["right"] for row in refusable),
        "unanswerable": len(refusable),
        "acceptance_length": round(
            sum(row["tokens"] for row in rows) / sum(row["passes"] for row in rows), 2
        ),
    }


def ask_all(
    questions: Iterable[dict[str, str | None]],
    documents: Path,
    *,
    model: str | None = None,
    k: int = 6,
    sentences: int = 1,
    margin: float = 0.05,
    check_quotes: bool = True,
) -> list[dict[str, Any]]:
    """Index a folder and answer questions on it as ``ragaccel ask`` does; see :func:`ask`.

    Args:
        questions: Rows of ``question``, ``answer`` (null if unanswerable) and ``file``.
        documents: The folder.
        model: A folder or hub name; by default the bundled reader.
        k: Number of passages for each question.
        sentences: Number of sentences to which a passage is cut; 0 keeps whole passages.
        margin: Maximum difference of a passage's score to the best one's; others are dropped.
        check_quotes: The option of ``RAG``.
    """
    embedder = load_embedder()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "index.db") as store:
        index_folder(store, embedder, documents)
        retriever = Retriever(store, embedder)
        compressed = CompressingRetriever(retriever, sentences=sentences or 1, margin=margin)
        source = compressed if sentences else retriever
        rag = RAG(LLM.load(model), source, k=k, check_quotes=check_quotes)
        return [ask(rag, question) for question in questions]


def ask(rag: RAG, question: dict[str, str | None]) -> dict[str, Any]:
    """Ask one question; return its answer with the judgement of it."""
    answer = rag.ask(str(question["question"]))
    right = is_right(answer.text, question["answer"])
    print(f"{'ok ' if right else 'BAD'} {question['question']}\n    {answer.text}", file=sys.stderr)
    file = question.get("file")
    return {
        "question": question["question"],
        "answer": answer.text,
        "expected": question["answer"],
        "words": question.get("words"),
        "right": right,
        "answered": answer.answered,
        "refusal": answer.refusal or None,
        "nearest": any(is_right(one.text, question["answer"]) for one in answer.nearest),
        "cited": any(passage.path == file for passage in answer.sources),
        "retrieved": any(
            plain(str(question["answer"])) in plain(passage.text) for passage in answer.passages
        ),
        "tokens": answer.stats.new_tokens,
        "passes": answer.stats.verify_passes,
    }


Row = dict[str, Any]

ANSWERED = ("answers_held_out", "answers_demo")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def words_of(text: str) -> list[str]:
    """Return a text's words for comparison: lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(said: str, wanted: str) -> float:
    """Return 1 if two texts have the same words in the same order, else 0."""
    return float(words_of(said) == words_of(wanted))


def f1(said: str, wanted: str) -> float:
    """Return the harmonic mean of precision and recall of words; repeated words count each time."""
    ours, theirs = words_of(said), words_of(wanted)
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def contains(said: str, wanted: str) -> float:
    """Return 1 if the answer contains the wanted words in a row, else 0."""
    ours, theirs = words_of(said), words_of(wanted)
    starts = range(len(ours) - len(theirs) + 1)
    return float(any(ours[i : i + len(theirs)] == theirs for i in starts))


SCORES = {"exact": exact_match, "f1": f1, "contains": contains}


def answer_row(name: str, data: Path | None) -> Row:
    """Answer a set with the bundled reader; return a row of the answers and the expected ones."""
    note(f"{name}: the bundled reader answers")
    with tempfile.TemporaryDirectory() as folder:
        if name == "answers_demo":
            documents = DEMOS / "documents"
            questions = list(read_rows(DEMOS / "questions.jsonl"))
        else:
            documents = Path(folder)
            questions = write_held_out(in_data("rag", data).parent, documents)
        said = ask_all(questions, documents)
    groups = [question["file"] for question in questions]
    return {"set": name, "answers": said, "groups": groups}


def answer_figures(row: Row) -> dict[str, Any]:
    """Return a set's mean scores: of all answers, and of those whose passage was found.

    The expected answer is the short one, or the sentence if no short one is known. ``quotation``
    has the scores of the right sentence itself, the best that quoting one sentence can reach.
    """
    pairs = list(zip(row["answers"], row["groups"], strict=True))
    kept = [(said, group) for said, group in pairs if said["expected"] is not None]
    found = [(said, group) for said, group in kept if said["retrieved"]]
    groups = [group for _, group in kept]
    judged = {
        name: spread([float(said[name]) for said, _ in kept], groups)
        for name in ("right", "retrieved", "cited")
    }
    refusals = [said["right"] for said, _ in pairs if said["expected"] is None]
    return {
        "questions": len(kept),
        "groups": len(set(groups)),
        "answer": _scores(kept, "answer"),
        "quotation": _scores(kept, "expected"),
        "found": len(found),
        "answer_when_found": _scores(found, "answer") if found else None,
        **judged,
        "unanswerable": len(refusals),
        "refused": sum(refusals),
    }


def _scores(kept: list[tuple[Row, str]], whose: str) -> dict[str, list[float]]:
    groups = [group for _, group in kept]
    texts = [(plain(said[whose]), said["words"] or said["expected"]) for said, _ in kept]
    return {
        name: spread([score(*pair) for pair in texts], groups) for name, score in SCORES.items()
    }


_FLOOR_SETS = ("squad", "nq", "demo")
_OTHER_COLLECTION = {"squad": "demo", "nq": "squad", "demo": "nq"}
_FLOOR_PASSAGES = 6  # passages of a question
_FLOOR_DEPTH = 40  # results searched for passages of other articles
_FLOOR_GRID = [n / 100 for n in range(71)]
ANSWERABLE, OTHER_ARTICLES, OTHER_COLLECTION = "answerable", "other articles", "other collection"


@cli.experiment(
    cli.DATA,
    cli.option("--sets", nargs="+", default=list(_FLOOR_SETS), choices=_FLOOR_SETS),
    cli.integer("--count", 300, "questions of each set"),
    cli.integer("--passages", 1500, "most passages of a set"),
    cli.option("--lost", type=float, default=0.02, help="share of answerable ones"),
    shown=("floor",),
)
def run_floor(options: Namespace) -> dict[str, Any]:
    """Floor: the similarity below which to refuse: ``python -m eval floor --data FOLDER``.

    The bundled reader quotes a sentence from any passages. Whether they answer the question shows
    in the similarity of their nearest sentence to it, by the bundled embedder. This run searches
    development questions in passages with the answer (``answerable``), in the same passages without
    the question's article (``other articles``) and in another collection (``other collection``),
    and counts the questions of each kind below a floor. The best floor is the highest that refuses
    at most the share ``--lost`` of the answerable questions of any set; ``ragaccel.rag.FLOOR`` is
    the one found.

    Development questions are those of half of the articles (``question_sets``), without articles
    that serve to evaluate the reader.
    """
    embedder = load_embedder()
    sets = {
        name: _development(load_set(name, embedder, options.data), options) for name in options.sets
    }
    scores: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        retrievers = dict(_indexed(sets, embedder, Path(folder)))
        for name, asked in sets.items():
            note(f"{len(asked.questions)} questions of {name}")
            other = retrievers.get(_OTHER_COLLECTION[name])
            scores[name] = _similarities(asked, retrievers[name], other, embedder)
    floor = fit_floor([kinds[ANSWERABLE] for kinds in scores.values()], options.lost)

    def of_each(figure: Callable[[list[float]], Any]) -> dict[str, dict[str, Any]]:
        return {
            name: {kind: figure(of) for kind, of in kinds.items() if of}
            for name, kinds in scores.items()
        }

    return result(
        "floor",
        {"count": options.count, "passages": options.passages, "lost": options.lost},
        floor=floor,
        questions={name: {kind: len(of) for kind, of in k.items()} for name, k in scores.items()},
        below_floor=of_each(lambda of: share_below(of, floor)),
        curves=of_each(lambda of: [share_below(of, at) for at in _FLOOR_GRID]),
        grid=_FLOOR_GRID,
    )


def fit_floor(answerable: Sequence[Sequence[float]], lost: float) -> float:
    """Return the grid's highest floor that loses at most a share of any set's questions.

    Args:
        answerable: The similarities of the answerable questions of each set.
        lost: The largest share of them below the floor.
    """
    fits = [at for at in _FLOOR_GRID if all(share_below(of, at) <= lost for of in answerable)]
    return max(fits)


def share_below(scores: Sequence[float], floor: float) -> float:
    return round(sum(score < floor for score in scores) / max(1, len(scores)), 4)


def _development(whole: QuestionSet, options: Namespace) -> QuestionSet:
    """Return a set of development questions, drawn with a fixed seed, with some passages.

    The questions' own passages come first, then others.
    """
    judged = set()
    if whole.name != "demo":
        data = in_data("rag", options.data).parent
        judged = {spoken_title(q.title) for q in load_questions(data) if q.held_out}
    questions = [
        q for q in whole.questions if not q.is_held_out and spoken_title(q.group) not in judged
    ]
    random.Random(0).shuffle(questions)
    questions = questions[: options.count]
    wanted = {key for question in questions for key in question.relevant}
    passages = sorted(whole.passages, key=lambda passage: passage.passage_id not in wanted)
    kept = passages[: max(len(wanted), options.passages)]
    return QuestionSet(whole.name, tuple(kept), tuple(questions))


def _indexed(
    sets: dict[str, QuestionSet], embedder: Embedder, folder: Path
) -> Iterator[tuple[str, Retriever]]:
    for name, asked in sets.items():
        note(f"{len(asked.passages)} passages of {name}")
        store = Store(folder / f"{name}.db")
        asked.index(store, embedder, folder)
        yield name, Retriever(store, embedder)


def _similarities(
    asked: QuestionSet, own: Retriever, other: Retriever | None, embedder: Embedder
) -> dict[str, list[float]]:
    """Return the questions' similarities to the nearest sentence, by kind of collection."""
    scores: dict[str, list[float]] = {ANSWERABLE: [], OTHER_ARTICLES: [], OTHER_COLLECTION: []}
    for question in asked.questions:
        ranked = own.search(question.text, _FLOOR_DEPTH)
        kinds = {ANSWERABLE: ranked, OTHER_ARTICLES: _elsewhere(ranked, question)}
        if other is not None:
            kinds[OTHER_COLLECTION] = other.search(question.text, _FLOOR_PASSAGES)
        if not question.relevant & {passage.passage_id for passage in ranked[:_FLOOR_PASSAGES]}:
            del kinds[ANSWERABLE]  # these passages do not answer them
        for kind, passages in kinds.items():
            nearest = nearest_sentences(embedder, question.text, passages[:_FLOOR_PASSAGES])
            if nearest:
                scores[kind].append(nearest[0].score)
    return scores


def _elsewhere(passages: Sequence[Passage], question: Question) -> list[Passage]:
    """Return the passages without those that answer and those of the question's article."""
    group = spoken_title(question.group)
    return [
        passage
        for passage in passages
        if passage.passage_id not in question.relevant
        and group not in (spoken_title(passage.title), passage.path)
    ]


WITHOUT_PASSAGE, WITHOUT_ARTICLE = "without its passage", "without its article"
_ASKED = ("count", "passages")  # settings on which the quotes depend
_FLOORS = (0.55, 0.6, 0.65, 0.7, 0.75)  # similarities of a quote with a share of the words
_SHARES = (0.5, 2 / 3, 0.75, 1.0)
_FLOORS_WITH_ALL = (0.55, 0.6, 0.65)  # similarities of a quote with all words
QuoteRule = tuple[tuple[float, float], ...]


@cli.experiment(
    cli.DATA,
    cli.integer("--count", 150, "questions of each set"),
    cli.integer("--passages", 300, "most passages of a set"),
    cli.option("--wrong", type=float, default=0.03, help="share of questions quoted wrongly"),
    cli.option("--missing", type=float, default=0.04, help="share quoted without an answer"),
    shown=("chosen", "figures"),
)
def run_quotes(options: Namespace) -> dict[str, Any]:
    """Quotes: which of the reader's quotes to show: ``python -m eval quotes --data FOLDER``.

    Asks the bundled reader people's questions, as ``ragaccel ask`` does, of a set's passages
    (``answerable``), without those that hold the answer (``without its passage``), without its
    whole article, and of another set. ``ragaccel.rag.QUOTE_RULES`` are pairs of a similarity and a
    share of the question's words; a quote needs one pair. The rules tried have one pair, or a
    second one with all words at a lower similarity, but not below 0.55: many sentences hold the
    only word of a short question.

    The chosen rule shows the most right quotes among those that quote at most the share ``--wrong``
    of the answerable questions wrongly, and at most ``--missing`` of the questions of each other
    kind. A quote is right if it is the sentence that people marked: another that answers as well
    counts as wrong. The questions are TyDi QA's, SelQA's and SquadShifts'.

    The default of ``--wrong`` was set with a look at ``python -m eval questions --held-out``: the
    rule chosen at 0.06 quoted 10 of those 387 questions wrongly, that at 0.03 quotes 5.
    """
    log = open_results_log(options.out, {name: getattr(options, name) for name in _ASKED})
    _ask_for_quotes(log, options)
    rows = log.rows
    chosen = fit_rule(rows, options.wrong, options.missing)
    return result(
        "quotes",
        {name: getattr(options, name) for name in (*_ASKED, "wrong", "missing")},
        questions=dict(Counter(row["set"] for row in rows if row["kind"] == ANSWERABLE)),
        chosen=chosen,
        figures=_of_each_set(rows, chosen),
        rules=[{"rule": rule, **_of_each_set(rows, rule)} for rule in _rules()],
    )


def _ask_for_quotes(log: ResultsLog, options: Namespace) -> None:
    """Ask the questions that the log does not have yet, of each kind of passages."""
    embedder, llm = load_embedder(), LLM.load()
    embed = cache(lambda text: embed_batch([text])[0])  # sentences are found again and again
    embed_batch = embedder.embed_documents
    embedder.embed_documents = lambda texts: np.stack([*map(embed, texts)])  # type: ignore[method-assign]
    sets = {
        name: _development(load_set(name, embedder, options.data), options)
        for name in SENTENCE_FILES
    }
    done = {(row["set"], row["question"]) for row in log.rows}
    with tempfile.TemporaryDirectory() as folder:
        retrievers = dict(_indexed(sets, embedder, Path(folder)))
        own = list(retrievers.values())
        for asked, one, other in zip(sets.values(), own, [*own[1:], *own], strict=False):
            told = _sentences(asked.name, options.data)
            for question in asked.questions:
                if (asked.name, question.text) not in done:
                    log.add(*_quotes(llm, asked.name, question, told[question.text], one, other))


def _rules() -> list[QuoteRule]:
    """Return the rules that are tried, the simplest first."""
    pairs = list(product(_FLOORS, _SHARES))
    return [(pair,) for pair in pairs] + [
        (pair, (least, 1.0)) for pair in pairs for least in _FLOORS_WITH_ALL if least < pair[0]
    ]


def fit_rule(rows: Sequence[Row], wrong: float, missing: float) -> QuoteRule:
    """Return the rule with the most right quotes that quotes no more wrongly than it may.

    Args:
        rows: Questions, as ``_quotes`` returns them.
        wrong: The largest share of answerable questions quoted wrongly.
        missing: The largest share of questions of each other kind that are quoted.
    """
    best, fitting = 0.0, ()
    for rule in _rules():
        figures = rule_figures(rows, rule)
        others = [share for name, share in figures.items() if name not in ("right", "wrong")]
        if figures["wrong"] <= wrong and max(others) <= missing and figures["right"] > best:
            best, fitting = figures["right"], rule
    return fitting


def rule_figures(rows: Sequence[Row], rule: QuoteRule) -> dict[str, float]:
    """Return the shares quoted of a rule: right and wrong, and of the other kinds of question."""

    def share(kind: str, right: bool) -> float:
        asked = [row for row in rows if row["kind"] == kind]
        shown = [row for row in asked if row["right"] is right and is_shown(row, rule)]
        return round(len(shown) / max(1, len(asked)), 4)

    others = (WITHOUT_PASSAGE, WITHOUT_ARTICLE, OTHER_COLLECTION)
    figures = {"right": share(ANSWERABLE, True), "wrong": share(ANSWERABLE, False)}
    return figures | {kind: share(kind, False) for kind in others}


def is_shown(row: Row, rule: QuoteRule) -> bool:
    """Return whether a rule shows the quote of a row."""
    return row["is_quote"] and any(
        row["similarity"] >= least and row["share"] >= needed for least, needed in rule
    )


def _of_each_set(rows: Sequence[Row], rule: QuoteRule) -> dict[str, dict[str, float]]:
    sets = {name: [row for row in rows if row["set"] == name] for name in SENTENCE_FILES}
    return {name: rule_figures(of, rule) for name, of in {**sets, "all": rows}.items()}


def _quotes(
    llm: LLM,
    name: str,
    question: Question,
    row: Row,
    own: Retriever,
    other: Retriever,
) -> Iterator[Row]:
    """Ask a question of each kind of passages; yield the quotes and their signs."""
    note(f"{name}: {question.text}")
    kinds = _kinds(question, row, own)
    kinds[OTHER_COLLECTION] = other.search(question.text, _FLOOR_PASSAGES)
    for kind, passages in kinds.items():
        signs = _signs(llm, own.embedder, question.text, passages)
        right = is_same_answer(signs["quote"], row)
        named = {"set": name, "kind": kind, "question": question.text}
        yield {**named, "sentence": row["sentence"], "right": right, **signs}


def _sentences(name: str, data: Path | None) -> dict[str, Row]:
    """Return the rows of a set by their question; the answer stands for an unknown sentence."""
    rows = read_rows(in_data(SENTENCE_FILES[name], data))
    return {row["question"].strip(): {"sentence": row["answer"], **row} for row in rows}


def _kinds(question: Question, row: Row, retriever: Retriever) -> dict[str, list[Passage]]:
    """Return the best passages of all, of those without the answer, and of other articles."""
    ranked = retriever.search(question.text, _FLOOR_DEPTH)
    answer = plain(row["sentence"])
    kinds = {
        ANSWERABLE: ranked,
        WITHOUT_PASSAGE: [
            passage
            for passage in ranked
            if passage.passage_id not in question.relevant and answer not in plain(passage.text)
        ],
        WITHOUT_ARTICLE: _elsewhere(ranked, question),
    }
    return {kind: list(passages[:_FLOOR_PASSAGES]) for kind, passages in kinds.items()}


def is_same_answer(quote: str, row: Row) -> bool:
    """Return whether a quote holds a row's sentence, or is a part of it that holds the answer."""
    said, sentence = plain(quote), plain(row["sentence"])
    whole = sentence in said
    return bool(said) and (
        whole or (said in sentence and (len(said) >= 40 or row["answer"] in said))
    )


class _Ranked:
    """A retriever that has found its passages already."""

    def __init__(self, passages: Sequence[Passage], embedder: Embedder) -> None:
        self._passages, self.embedder = passages, embedder

    def search(self, _: str, k: int = 6) -> list[Passage]:
        return list(self._passages[:k])


def _signs(llm: LLM, embedder: Embedder, question: str, passages: Sequence[Passage]) -> Row:
    """Return what the reader quotes from passages, and the signs that it answers the question."""
    compressed = CompressingRetriever(_Ranked(passages, embedder), sentences=1, margin=0.05)
    found = compressed.search(question)
    best = next(iter(nearest_sentences(embedder, question, found)), None)
    if best is None or not holds_what_is_asked(question, best):
        return {"quote": "", "is_quote": False}
    share = share_of_words(question, best)
    signs = {"similarity": round(best.score, 4), "share": share, "nearest": best.text}
    if not any(is_shown({**signs, "is_quote": True}, rule) for rule in _rules()):
        return {"quote": "", "is_quote": False, **signs}
    answer = RAG(llm, lambda _: found, check_quotes=False).ask(question)
    is_quote = not check_quote(answer, question, best)
    return {"quote": plain(answer.text), "is_quote": is_quote, **signs}


MIXED = Path(__file__).parents[1] / "tasks" / "mixed"
_LINES, _COLUMNS = 24, 80
_NOT_ANSWERED = 5  # exit code of `ragaccel ask`
_TERMINAL = {"TERM": "dumb", "COLUMNS": f"{_COLUMNS}", "LINES": f"{_LINES}"}
"""Variables of a terminal without spinners, whose output is what stays on the screen."""


@cli.experiment(
    cli.option("--tasks", type=Path, default=MIXED, help="folder of questions.jsonl and documents"),
    shown=("figures",),
)
def run_first_screen(options: Namespace) -> dict[str, Any]:
    """What a person reads first: ``python -m eval first_screen --out eval/results``.

    Asks every question on a folder of mixed documents with ``ragaccel ask`` and no model named, on
    a terminal of 24 lines of 80 columns. ``right`` counts the answerable questions whose sentence
    is on the screen, ``misleading`` the questions with a wrong sentence shown as the answer, and
    ``refused`` those without an answer that are not answered.
    """
    questions = [json.loads(line) for line in (options.tasks / "questions.jsonl").open()]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(options.tasks / "documents", documents := Path(folder) / "documents")
        home = {"RAGACCEL_HOME": str(Path(folder) / "home")}
        _on_terminal(["index", str(documents)], home)
        rows = [_first_screen(question, documents, home) for question in questions]
    answerable = [row for row in rows if row["kind"] == "answerable"]
    others = [row for row in rows if row["kind"] != "answerable"]
    figures = {
        "right": sum(row["right"] for row in answerable),
        "answerable": len(answerable),
        "misleading": sum(row["misleading"] for row in rows),
        "refused": sum(not row["answered"] for row in others),
        "unanswerable": len(others),
    }
    return result("first_screen", {"tasks": options.tasks.name}, figures=figures, questions=rows)


def _first_screen(question: Row, documents: Path, home: dict[str, str]) -> Row:
    """Ask a question; return whether the screen shows its sentence, and whether it misleads."""
    code, screen = _on_terminal(["ask", str(documents), question["question"]], home)
    if code not in (0, _NOT_ANSWERED):
        raise RuntimeError(f"ragaccel ask ended with {code}: {screen}")
    expected = [
        _letters(text) for text in (question["sentence"], *question["alternatives"]) if text
    ]
    right = any(text in _letters(screen) for text in expected)
    quote = _letters(re.split(r"quotes one sentence", screen)[-1].split("»")[0])
    fits = any(quote in text or text in quote for text in expected)
    row = {name: question[name] for name in ("question", "kind", "language", "file")}
    answered = code == 0
    said = {"answered": answered, "right": right, "misleading": answered and not fits}
    note(f"{'ok ' if right or not (expected or answered) else 'BAD'} {question['question']}")
    return {**row, **said, "screen": screen.splitlines()}


def _letters(text: str) -> str:
    """Return the letters and digits of a text: what is left after cells, marks and wrapping."""
    return "".join(character for character in text.casefold() if character.isalnum())


def _on_terminal(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run the command on a terminal; return its exit code and the first screen of its output."""
    import pty

    terminal, inside = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "ragaccel", *arguments],
        env={**os.environ, **_TERMINAL, **environment},
        stdin=subprocess.DEVNULL,
        stdout=inside,
        stderr=inside,
    ) as process:
        os.close(inside)
        written = b"".join(iter(lambda: _read(terminal), b"")).decode()
    os.close(terminal)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "").split("\n")
    rows = [line[at : at + _COLUMNS] for line in lines for at in range(0, len(line) or 1, _COLUMNS)]
    return process.returncode, "\n".join(rows[:_LINES])


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises it when the command has ended
        return b""
