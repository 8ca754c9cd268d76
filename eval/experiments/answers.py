"""Evaluate the bundled reader: its answers, alone and after retrieval, and its refusals.

The figures are exact match, F1 and containment. Texts are compared in lower case, without
punctuation and the articles *a*, *an* and *the* (Rajpurkar et al., 2016). A reader that quotes
whole sentences rarely matches a short answer exactly, so containment says whether its text contains
the answer.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from eval import cli
from eval.data import (
    DEMOS,
    in_data,
    plain,
    read_rows,
)
from eval.measure import spread
from eval.runner import CACHE, note, result, write_whole
from ragaccel import (
    LLM,
    RAG,
    Answer,
    CompressingRetriever,
    Passage,
    Retriever,
    Store,
    index_folder,
    load_embedder,
)
from ragaccel.quotes import QuoteSigns, ruled_out
from ragaccel.rag import READER_SENTENCES
from ragaccel.retrieval.compression import nearest_sentences
from ragaccel.retrieval.loaders import read_document
from ragaccel.retrieval.sentence_ranker import default_ranker
from recipes.reader.corpus import DEVELOPMENT, HELD_OUT, Corpus, load_corpus
from recipes.reader.evaluate import chances, evaluate, together
from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.folder import ANSWER, ARTICLE, NOTHING, Folder

READER = Path(__file__).parents[2] / "ragaccel" / "models" / "reader"
XQUAD, OTHERS = "xquad", "others"


@cli.experiment(
    cli.DATA,
    cli.option("--reader", type=Path, default=READER, help="folder of the reader"),
    cli.option("--part", default=HELD_OUT, choices=[HELD_OUT, DEVELOPMENT]),
    cli.integer("--examples", 1000, "questions"),
    shown=("figures",),
)
def run_reader(options: Namespace) -> dict[str, Any]:
    """Evaluate the bundled reader on unseen articles: ``python -m eval reader --data FOLDER``.

    Each question gets the ranker's first five sentences of six passages, from a folder of its
    article and of 400 other paragraphs. The figures, in percent of the questions of each set, are
    of the reader's choice alone, and of that by its chances and the sentences' values together: see
    ``recipes.reader.evaluate``.
    """
    corpus = load_corpus(in_data("qa", options.data).parent)
    model, maker = reader_and_maker(options.reader, corpus, options.part)
    return result(
        "reader",
        {"examples": options.examples, "part": options.part, "data": corpus.digest()},
        figures=evaluate(model, maker, questions=options.examples),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def reader_and_maker(
    reader: Path, corpus: Corpus, part: str
) -> tuple[LlamaForCausalLM, ExampleMaker]:
    """Return a reader and a maker of its prompts from the questions of a part."""
    folder = Folder(corpus, part, load_embedder(), CACHE / "vectors", default_ranker())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reader)
    return AutoModelForCausalLM.from_pretrained(reader), ExampleMaker(folder, tokenizer)


REFUSAL = "The passages do not tell."


def is_right(answer: str, expected: str | None) -> bool:
    """Return whether an answer is right for a question's expected answer (None: a refusal)."""
    said = plain(answer)
    if expected is None:
        return said == REFUSAL
    wanted = plain(expected)
    return wanted in said or (len(said) >= 40 and said in wanted)


def write_held_out(
    data: Path, folder: Path, which: str = XQUAD, *, count: int = 300
) -> list[dict[str, str | None]]:
    """Write held-out articles as a file each; return the questions about them.

    Args:
        data: The folder of the question sets.
        folder: Gets the files.
        which: ``XQUAD``: its sixteen articles with all questions; ``OTHERS``: those of the other
            sets, with ``count`` of their questions.
        count: The number of those questions.
    """
    corpus = load_corpus(data)
    asked = [
        question
        for question in corpus.of_part(HELD_OUT)
        if (question.source == "xquad") == (which == XQUAD)
        and corpus.paragraphs[question.paragraph].title
    ]
    if which != XQUAD:
        asked = random.Random(0).sample(asked, min(count, len(asked)))
    articles: dict[str, dict[str, None]] = {}
    titles = {corpus.paragraphs[question.paragraph].title for question in asked}
    for paragraph in corpus.paragraphs:
        if paragraph.part == HELD_OUT and paragraph.title in titles:
            file = _file_of(paragraph.title)
            articles.setdefault(file, {})[" ".join(paragraph.sentences)] = None
    for file, passages in articles.items():
        (folder / file).write_text("\n\n".join(passages) + "\n", encoding="utf-8")
    return [
        {
            "question": question.text,
            "answer": corpus.paragraphs[question.paragraph].sentences[question.sentence],
            "file": _file_of(corpus.paragraphs[question.paragraph].title),
            "words": question.answer,
        }
        for question in asked
    ]


def _file_of(title: str) -> str:
    return re.sub(r"\W+", "-", title) + ".txt"


def off_topic(data: Path, count: int) -> list[dict[str, str | None]]:
    """Return questions on other articles than XQuAD's, which its articles do not answer."""
    corpus = load_corpus(data)
    asked = [question.text for question in corpus.of_part(HELD_OUT) if question.source != "xquad"]
    drawn = random.Random(1).sample(asked, count)
    return [{"question": question, "answer": None, "file": None} for question in drawn]


@cli.experiment(
    cli.option("--held-out", choices=[XQUAD, OTHERS], help="ask about held-out articles instead"),
    cli.option("--off-topic", type=int, default=0, help="with --held-out: further questions"),
    cli.DATA,
    cli.option("--model", help="folder or hub name; without one, the bundled reader"),
    cli.option("--questions", type=Path, default=DEMOS / "questions.jsonl", help="JSON lines"),
    cli.option("--folder", type=Path, default=DEMOS / "documents", help="the documents"),
    cli.option("-k", type=int, default=6, help="passages a question"),
    cli.integer("--sentences", READER_SENTENCES, "first ones that are kept; 0: whole passages"),
    cli.option("--unchecked", action="store_true", help="what the reader says, sure or not"),
    shown=("figures",),
)
def run_questions(options: Namespace) -> dict[str, Any]:
    """Answer the demo's questions on its documents: ``python -m eval questions``.

    An answer is right if it contains the expected sentence, or for a table at least 40 characters
    of the right row; white space and citations are ignored. An unanswerable question must be
    refused. ``nearest_alone`` counts the questions that the sentence of the highest similarity
    answers, ``first_alone`` those of the first one given, ``cited`` answers whose citation names a
    passage of the right file, ``not_verbatim`` those of all questions that no file they cite has
    word for word, read anew, and ``right_nearest`` those that are right or refused with the right
    sentence among the nearest, which a refusal shows, and ``median_first_word`` is in seconds from
    the question on, with the index open.

    ``--held-out xquad`` asks people's questions on the sixteen XQuAD articles that nothing was
    trained or chosen on, with one file for each article, and ``--held-out others`` 300 on held-out
    articles of the other sets: ``python -m eval questions --held-out xquad --data FOLDER``.
    ``--off-topic 200`` adds questions on those others to XQuAD's, which must be refused.
    """
    rows = answers_to_all(options)
    if options.out:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out.with_suffix(".rows.jsonl"), "".join(lines))
    given = ("held_out", "off_topic", "model", "k", "sentences", "unchecked")
    settings = {name: getattr(options, name) for name in given}
    return result("questions", settings, figures=figures_of(rows))


def answers_to_all(options: Namespace) -> list[dict[str, Any]]:
    """Ask the questions that the options choose, on their documents; return judged answers."""
    with tempfile.TemporaryDirectory() as folder:
        documents = options.folder
        if options.held_out:
            documents = Path(folder)
            data = in_data("rag", options.data).parent
            questions = write_held_out(data, documents, options.held_out)
            questions += off_topic(data, options.off_topic)
        else:
            questions = list(read_rows(options.questions))
        return ask_all(
            questions,
            documents,
            model=options.model,
            k=options.k,
            sentences=options.sentences,
            check_quotes=not options.unchecked,
        )


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of right, wrong, cited and refused answers, from judged answers."""
    answerable = [row for row in rows if row["expected"] is not None]
    refusable = [row for row in rows if row["expected"] is None]
    return {
        "right": sum(row["right"] for row in answerable),
        "nearest_alone": sum(row["nearest_alone"] for row in answerable),
        "first_alone": sum(row["first_alone"] for row in answerable),
        "wrong": sum(not row["right"] and row["answered"] for row in answerable),
        "right_nearest": sum(row["right"] or row["nearest"] for row in answerable),
        "cited": sum(row["cited"] for row in answerable),
        "retrieved": sum(row["retrieved"] for row in answerable),
        "not_verbatim": sum(row["answered"] and not row["verbatim"] for row in rows),
        "answerable": len(answerable),
        "refused": sum(row["right"] for row in refusable),
        "unanswerable": len(refusable),
        "acceptance_length": round(
            sum(row["tokens"] for row in rows) / sum(row["passes"] for row in rows), 2
        ),
        "median_first_word": median(row["first_word"] for row in rows),
    }


def ask_all(
    questions: Iterable[dict[str, str | None]],
    documents: Path,
    *,
    model: str | None = None,
    k: int = 6,
    sentences: int = READER_SENTENCES,
    check_quotes: bool = True,
) -> list[dict[str, Any]]:
    """Index a folder and answer questions on it as ``ragaccel ask`` does; see :func:`ask`.

    Args:
        questions: Rows of ``question``, ``answer`` (null if unanswerable) and ``file``.
        documents: The folder.
        model: A folder or hub name; by default the bundled reader.
        k: Number of passages for each question.
        sentences: Number of the first sentences that are kept; 0 keeps whole passages.
        check_quotes: The option of ``RAG``.
    """
    embedder = load_embedder()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "index.db") as store:
        index_folder(store, embedder, documents)
        retriever = Retriever(store, embedder)
        compressed = CompressingRetriever(retriever, sentences=sentences or 1)
        source = compressed if sentences else retriever
        rag = RAG(LLM.load(model), source, k=k, check_quotes=check_quotes)
        return [ask(rag, question, documents) for question in questions]


def ask(rag: RAG, question: dict[str, str | None], documents: Path) -> dict[str, Any]:
    """Ask one question on a folder; return its answer with the judgement of it."""
    started = time.perf_counter()
    stream = rag.stream(str(question["question"]))
    next(stream, "")
    first_word = time.perf_counter() - started
    answer = stream.finish()
    right = is_right(answer.text, question["answer"])
    print(f"{'ok ' if right else 'BAD'} {question['question']}\n    {answer.text}", file=sys.stderr)
    file = question.get("file")
    nearest = _most_similar(rag, str(question["question"]))
    first = next(iter(answer.passages), Passage("", "-")).text
    return {
        "question": question["question"],
        "answer": answer.text,
        "expected": question["answer"],
        "words": question.get("words"),
        "right": right,
        "answered": answer.answered,
        "refusal": answer.refusal or None,
        "nearest_alone": is_right(nearest, question["answer"]),
        "first_alone": is_right(first, question["answer"]),
        "nearest": any(is_right(one.text, question["answer"]) for one in answer.nearest),
        "cited": any(passage.path == file for passage in answer.sources),
        "verbatim": is_verbatim(answer, documents),
        "retrieved": any(
            plain(str(question["answer"])) in plain(passage.text) for passage in answer.passages
        ),
        "tokens": answer.stats.new_tokens,
        "passes": answer.stats.verify_passes,
        "first_word": round(first_word, 3),
    }


def is_verbatim(answer: Answer, documents: Path) -> bool:
    """Return whether a file that an answer cites has its text, but for white space.

    The file is read anew: what was kept of it in the index, cut and quoted is not trusted.
    """
    said = plain(answer.text)
    cited = {answer.passages[number - 1].path for number in answer.cited_numbers}
    return bool(said) and any(said in plain(read_document(documents / path).text) for path in cited)


def _most_similar(rag: RAG, question: str) -> str:
    """Return the sentence of the passages found that is most similar to the question."""
    source: Any = rag.retriever
    whole = getattr(source, "retriever", source)
    scored = nearest_sentences(source.embedder, question, whole.search(question, rag.k))
    return scored[0].text if scored else "-"


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


ANSWERABLE, NEAR_MISS, OFF_TOPIC = "answerable", "near miss", "off topic"
_KINDS = {ANSWERABLE: NOTHING, NEAR_MISS: ANSWER, OFF_TOPIC: ARTICLE}
_RIDGE = 1e-3  # keeps a weight finite if a sign tells right from wrong perfectly


@cli.experiment(
    cli.DATA,
    cli.integer("--count", 3000, "questions at most"),
    cli.option(
        "--lost",
        type=float,
        default=0.04,
        help="share of the right quotes that is refused",
    ),
    shown=("choice", "weights", "bias", "least", "figures"),
)
def run_quotes(options: Namespace) -> dict[str, Any]:
    """Quotes: which of the reader's quotes to show: ``python -m eval quotes --data FOLDER``.

    Development questions get the ranker's first five sentences, of passages that answer
    (``answerable``), of the same without the answer (``near miss``), and of other articles
    (``off topic``). A conditional logit of the answerable ones whose sentence is given, of the
    logarithm of the reader's chance and the ranker's relevance, gives ``CHOICE_WEIGHT`` of
    ``ragaccel.quotes``: the weight of the second beside the first. A logistic regression of the
    signs of each quote (``QuoteSigns``) on whether it is right gives ``SIGN_WEIGHTS`` and ``BIAS``,
    with the choice as it is in the library; questions without an answer count half. ``MIN_CHANCE``
    is the highest that refuses at most the share ``--lost`` of the right quotes.
    The figures are cross-validated as to the signs: each half is judged with the other's weights.
    The choice is that of the library: set its ``CHOICE_WEIGHT`` and run this again.

    A quote is right if it is the sentence that people marked: another that answers as well counts
    as wrong.
    """
    corpus = load_corpus(in_data("qa", options.data).parent)
    model, maker = reader_and_maker(READER, corpus, DEVELOPMENT)
    quotes = draw_quotes(model, maker, options.count)
    weights, bias = fit_signs(quotes)
    judged = cross_validated(quotes)
    curve = curve_of(judged)
    least = fit_least(curve, options.lost)
    return result(
        "quotes",
        {name: getattr(options, name) for name in ("count", "lost")},
        questions=dict(Counter(quote.kind for quote in quotes)),
        choice=fit_choice(quotes),
        weights=dict(zip(QuoteSigns._fields, np.round(weights, 3).tolist(), strict=True)),
        bias=round(bias, 3),
        least=least,
        figures=curve[_CHANCES.index(least)],
        curve=curve,
    )


_CHANCES = [round(0.02 * n, 2) for n in range(50)]


@dataclass(frozen=True, slots=True)
class Quote:
    """A question's likeliest quote.

    Attributes:
        signs: None if the question's sentence is not among those given, or none may be quoted.
        features: Of each sentence that may be quoted the logarithm of its chance, and its
            relevance.
        gold: Index of the right one; None if there is none.
    """

    kind: str
    is_right: bool
    signs: QuoteSigns | None
    features: Sequence[Sequence[float]] = ()
    gold: int | None = None


Judged = list[tuple[Quote, float]]
"""Quotes, each with the chance that it is right."""


def draw_quotes(model: LlamaForCausalLM, maker: ExampleMaker, count: int) -> list[Quote]:
    """Return the reader's quotes for the questions of a folder, with and without the answer.

    Which questions are drawn depends on their texts alone, not on how sentences are split.
    """
    asked = [question.text for question in maker.folder.questions]
    numbers = sorted(range(len(asked)), key=lambda n: random.Random(asked[n]).random())
    quotes: list[Quote] = []
    for kind, without in _KINDS.items():
        note(f"{count} questions, {kind}")
        made = [maker.make(n, random.Random(asked[n]), without=without) for n in numbers[:count]]
        kept = [example for example in made if example is not None]
        of_each = chances(model, kept)
        quotes += [_quote(maker.folder, *one, kind) for one in zip(kept, of_each, strict=True)]
        quotes += [Quote(kind, False, None)] * (len(made) - len(kept))
    return quotes


def _quote(folder: Folder, example: Example, of_each: Sequence[float], kind: str) -> Quote:
    values = together(folder, example, of_each)
    places = [place for place, value in enumerate(values) if value > -math.inf]
    if not places:
        return Quote(kind, False, None)
    chosen = values.index(max(values))
    question = example.question.text
    sentences = ruled_out(question, folder.sentences_of(example.nearest))
    return Quote(
        kind,
        chosen == example.gold,
        QuoteSigns.of(question, sentences, chosen),
        [(math.log(of_each[at] + 1e-9), sentences[at].score) for at in places],
        places.index(example.gold) if example.gold in places else None,
    )


def fit_choice(quotes: Sequence[Quote]) -> float:
    """Return the weight of a sentence's relevance beside the logarithm of its chance."""
    asked = [quote for quote in quotes if quote.gold is not None]
    width = max(len(quote.features) for quote in asked)
    absent = [[-1e9, 0.0]]
    features = torch.tensor(
        [[*quote.features, *absent * (width - len(quote.features))] for quote in asked]
    )
    gold = torch.tensor([quote.gold for quote in asked])
    weights = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = F.cross_entropy(features @ weights, gold, reduction="sum")
        total = total + _RIDGE * weights.square().sum()
        torch.autograd.backward(total)
        return total

    optimizer.step(loss)
    of_chance, of_relevance = weights.tolist()
    return round(of_relevance / of_chance, 2)


def fit_signs(quotes: Sequence[Quote]) -> tuple[NDArray[np.float64], float]:
    """Return the weights of the signs and the bias, by Newton's method."""
    kept = [quote for quote in quotes if quote.signs is not None]
    signs = np.array([[*quote.signs, 1.0] for quote in kept])
    right = np.array([float(quote.is_right) for quote in kept])
    counts = np.array([1.0 if quote.kind == ANSWERABLE else 0.5 for quote in kept])
    weights = np.zeros(signs.shape[1])
    for _ in range(30):
        fitted = 1 / (1 + np.exp(-signs @ weights))
        slopes = signs.T @ (counts * (right - fitted)) - _RIDGE * weights
        bends = (signs.T * (counts * fitted * (1 - fitted))) @ signs
        weights += np.linalg.solve(bends + _RIDGE * np.eye(len(weights)), slopes)
    return weights[:-1], float(weights[-1])


def cross_validated(quotes: Sequence[Quote]) -> Judged:
    """Return the chance of each quote, by the weights fitted to the other half of them."""
    halves = quotes[::2], quotes[1::2]
    judged: Judged = []
    for half, other in (halves, halves[::-1]):
        weights, bias = fit_signs(other)
        for quote in half:
            is_none = quote.signs is None
            total = -np.inf if is_none else float(np.dot(weights, quote.signs)) + bias
            judged.append((quote, float(1 / (1 + np.exp(-total)))))
    return judged


def shown_shares(judged: Judged, least: float) -> dict[str, float]:
    """Return the shares of questions quoted rightly and wrongly, and of each other kind quoted."""
    shares = {}
    for name, kind, right in (
        ("right", ANSWERABLE, True), ("wrong", ANSWERABLE, False),
        (NEAR_MISS, NEAR_MISS, False), (OFF_TOPIC, OFF_TOPIC, False),
    ):  # fmt: skip
        asked = [(quote, chance) for quote, chance in judged if quote.kind == kind]
        shown = [quote for quote, chance in asked if chance >= least and quote.is_right is right]
        shares[name] = round(len(shown) / max(1, len(asked)), 4)
    return shares


def curve_of(judged: Judged) -> list[dict[str, float]]:
    """Return the shares of ``shown_shares`` by chance, and ``lost``, of the right quotes."""
    every = max(shown_shares(judged, 0.0)["right"], 1e-9)
    curve = []
    for least in _CHANCES:
        shares = shown_shares(judged, least)
        curve.append({"least": least, **shares, "lost": round(1 - shares["right"] / every, 4)})
    return curve


def fit_least(curve: Sequence[dict[str, float]], lost: float) -> float:
    """Return the highest chance of a curve at which no more than that share is lost."""
    return max(point["least"] for point in curve if point["lost"] <= lost)


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
    quote = _letters(re.split(r"quotes one sentence[^«]*", screen)[-1].split("»")[0])
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
