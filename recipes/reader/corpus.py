"""People's questions, with the paragraph and the sentence that answers each, split by article.

All paragraphs of an article are in one part: ``TRAIN``, ``DEVELOPMENT``, on which things may be
chosen, or ``HELD_OUT``, on which they are only measured.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragaccel.errors import ConfigurationError
from ragaccel.passage import split_sentences

TRAIN, DEVELOPMENT, HELD_OUT = "train", "development", "held-out"
DEVELOPMENT_SHARE, HELD_OUT_SHARE = 0.04, 0.04  # of the articles
NUM_HELD_OUT_XQUAD = 16
XQUAD_START = 2910  # the lines before are of SQuAD 2.0

# Left out: chat logs (molweni), answers from several sentences (hotpotqa), plots (narrativeqa) and
# reports (tatqa), in which a single sentence seldom answers.
QUESTION_SETS = ("squad1_train_part", "squadshifts_newwiki", "tydiqa_en", "onestopqa", "qamr",
                 "selqa", "fairytaleqa")  # fmt: skip
FOREIGN_SETS = ("ml_fr_piaf", "ml_no_norquad", "ml_pt_faquad")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of an article, split into sentences.

    Attributes:
        article: Names the article across all sets.
        part: ``TRAIN``, ``DEVELOPMENT`` or ``HELD_OUT``: all paragraphs of an article are in one.
    """

    title: str
    sentences: tuple[str, ...]
    article: str
    part: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question written by a person.

    Attributes:
        paragraph: Index of the paragraph that it was asked of.
        sentence: Index of the sentence that answers it.
        answer: The short answer, or "".
        source: Name of its set.
    """

    text: str
    paragraph: int
    sentence: int
    answer: str
    source: str


@dataclass(slots=True)
class Corpus:
    """All paragraphs, and the questions asked of them."""

    paragraphs: list[Paragraph]
    questions: list[Question]

    def of_part(self, part: str) -> list[Question]:
        """Return the questions of a part."""
        return [q for q in self.questions if self.paragraphs[q.paragraph].part == part]

    def digest(self) -> str:
        """Return a digest of all questions and paragraphs, to be told with the trained model."""
        every = (
            [(q.text, q.paragraph, q.sentence) for q in self.questions],
            [(p.title, p.sentences, p.part) for p in self.paragraphs],
        )
        return _digest(json.dumps(every))[:16]


def load_corpus(data: Path) -> Corpus:
    """Read the English question sets under ``data``.

    Raises:
        ConfigurationError: The folder holds none.
    """
    files = _files_of(data, QUESTION_SETS)
    builder = _Builder(held_out=held_out_titles(data))
    for line, row in enumerate(rows_of(data / "rag" / "squad_like.jsonl")):
        builder.add(row, "xquad" if line >= XQUAD_START else "squad")
    for row in rows_of(data / "rag" / "nq_open_oracle.jsonl"):
        builder.add(row, "nq")
    for file in files:
        for row in rows_of(file):
            builder.add(row, file.name.split(".")[0])
    return Corpus(builder.paragraphs, builder.questions)


def load_foreign_corpus(data: Path) -> Corpus:
    """Read the French, Norwegian and Portuguese question sets; see ``load_corpus``."""
    builder = _Builder(held_out=frozenset())
    for file in _files_of(data, FOREIGN_SETS):
        for row in rows_of(file):
            builder.add(row, file.name.split(".")[0])
    return Corpus(builder.paragraphs, builder.questions)


def _files_of(data: Path, names: Sequence[str]) -> list[Path]:
    files = [data / "qa" / f"{name}.jsonl.xz" for name in names]
    if not all(file.exists() for file in files):
        raise ConfigurationError(
            f"there are no question sets in {data / 'qa'}: pass --data FOLDER or set RAGACCEL_DATA"
        )
    return files


def held_out_titles(data: Path) -> frozenset[str]:
    """Return the titles of the sixteen XQuAD articles that nothing is trained or chosen on."""
    squad = rows_of(data / "rag" / "squad_like.jsonl")
    others = {row["passages"][0]["title"] for row in squad[:XQUAD_START]}
    xquad = {row["passages"][0]["title"] for row in squad[XQUAD_START:]} - others
    held_out = sorted(xquad, key=_digest)[:NUM_HELD_OUT_XQUAD]
    return frozenset(_shown(title) for title in held_out)


class _Builder:
    """Collects paragraphs once each, and the questions whose sentence is found in them."""

    def __init__(self, held_out: frozenset[str]) -> None:
        self.held_out = held_out
        self.paragraphs: list[Paragraph] = []
        self.questions: list[Question] = []
        self._index_of: dict[tuple[str, tuple[str, ...]], int] = {}
        self._asked: set[tuple[str, int]] = set()

    def add(self, row: dict[str, Any], source: str) -> None:
        answer, given = row["answer"], row.get("sentence", "")
        if not answer or (source not in ("xquad", "squad", "nq") and not given):
            return
        for passage in row["passages"]:
            text = detokenized(passage["text"]) if source == "nq" else passage["text"]
            sentences = tuple(filter(None, map(one_line, split_sentences(text))))
            place = _place_of(sentences, row["question"], answer, one_line(given))
            shown = _shown(passage["title"])
            if place is None or (source != "xquad" and shown in self.held_out):
                continue
            index = self._paragraph(shown, sentences, source)
            question = Question(one_line(row["question"]), index, place, answer, source)
            if (question.text, index) not in self._asked:
                self._asked.add((question.text, index))
                self.questions.append(question)
            return

    def _paragraph(self, shown: str, sentences: tuple[str, ...], source: str) -> int:
        if (shown, sentences) not in self._index_of:
            # titles of two sets may be the same article's
            article = shown.casefold() or _digest(sentences[0])
            part = HELD_OUT if shown in self.held_out else _part(article, source)
            self._index_of[shown, sentences] = len(self.paragraphs)
            self.paragraphs.append(Paragraph(shown, sentences, article, part))
        return self._index_of[shown, sentences]


def _part(article: str, source: str) -> str:
    drawn = int(_digest(article)[:8], 16) / 2**32
    if source == "xquad":
        return TRAIN
    if drawn < HELD_OUT_SHARE:
        return HELD_OUT
    return DEVELOPMENT if drawn < HELD_OUT_SHARE + DEVELOPMENT_SHARE else TRAIN


def _place_of(sentences: tuple[str, ...], question: str, answer: str, given: str) -> int | None:
    """Return the index of the sentence that answers, or None if two answer equally well.

    It is the one that was given, else the one with the answer and most words of the question.
    """
    if given:
        holding = [i for i, s in enumerate(sentences) if given in s or s in given]
        return max(holding, key=lambda i: len(sentences[i]), default=None)
    holding = [i for i, s in enumerate(sentences) if answer.casefold() in s.casefold()]
    asked = _words(question)
    shared: dict[int, list[int]] = defaultdict(list)
    for i in holding:
        shared[len(asked & _words(sentences[i]))].append(i)
    best = shared[max(shared)] if shared else []
    return best[0] if len(best) == 1 else None


def _shown(title: str) -> str:
    return title.replace("_", " ").strip()


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def detokenized(text: str) -> str:
    """Return text without the spaces that tokenized corpora have around punctuation."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = text.replace("`` ", '"').replace(" ''", '"').replace("( ", "(").replace(" )", ")")
    text = re.sub(r'(^| )" ([^"]*) "', r'\1"\2"', text)
    return re.sub(r" ([.,;:?!%]|'s|n't)(?=\W|$)", r"\1", text)


def one_line(text: str) -> str:
    """Return text with every run of white space as one space."""
    return re.sub(r"\s+", " ", text).strip()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON-lines file, also of a packed one (``.xz``)."""
    raw = path.read_bytes()
    raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
    lines: Iterable[str] = raw.decode("utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
