"""Training examples: passages as in use, and which of their sentences answers the question."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from ragaccel.retrieval.language import frequent_words, language_of
from ragaccel.retrieval.sentence_ranker import Row, rows_of
from recipes.ranker.pages import Page, PageMaker
from recipes.reader.folder import ANSWER, ARTICLE, NOTHING, NUM_RANKED, Folder

if TYPE_CHECKING:
    from ragaccel.retrieval.sentence_ranker import Encode
    from recipes.reader.corpus import Question

_NAMES = re.compile(r"\b(?:[A-Z][\w’-]*(?: [A-Z][\w’-]*)*|\d[\d,.]*\d)\b")
NUM_EXCHANGES = 8  # names or numbers drawn, of which the first that the passages lack is used
MAX_PASSAGES = 4  # of an example, two at least
WITHOUT_ANSWER_SHARE, OFF_TOPIC_SHARE = 0.20, 0.03
ADDED_SHARE = 0.5  # of the questions whose passage is not among the nearest: it takes a place
UNTITLED_SHARE = 0.1
EASY_SHARE = 0.4  # are asked of the questions that the nearest sentence answers, of the others all
FOREIGN_SHARE, PAGES_SHARE = 0.10, 0.06  # of the questions, beside the English ones of people
UNMARKED_SHARE, KEYWORDS_SHARE, MISTYPED_SHARE = 0.3, 0.08, 0.08  # of the questions, as typed


@dataclass(frozen=True, slots=True)
class Example:
    """A question with passages.

    Attributes:
        rows: As ``rows_of`` returns them, of all passages.
        size: The number of sentences.
        gold: Index of the right one; ``size`` if none is.
        sentences: The folder's rows of the sentences, in the same order; of made-up pages empty.
    """

    rows: list[Row]
    size: int
    gold: int
    sentences: list[int] = field(default_factory=list)


class ExampleMaker:
    """Makes examples of a folder's questions."""

    def __init__(self, folder: Folder, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self.encode: Encode = lru_cache(1 << 18)(self._encode)
        self._names: dict[str, list[str]] = defaultdict(list)
        for question in folder.questions:
            names = [name for name in names_in(question.text) if not name[0].isdigit()]
            self._names[folder.corpus.paragraphs[question.paragraph].article] += names
        self._all_names = [name for names in self._names.values() for name in names]

    def _encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def draw(self, number: int, rng: random.Random) -> Example | None:
        """Return an example as in training.

        It is None if the answer is not among its passages, and for most of the questions that the
        nearest sentence answers, by similarity and shared words.
        """
        if self._is_easy(number, rng) and rng.random() >= EASY_SHARE:
            return None
        chance = rng.random()
        without = NOTHING
        if chance < WITHOUT_ANSWER_SHARE + OFF_TOPIC_SHARE:
            without = ARTICLE if chance < OFF_TOPIC_SHARE else ANSWER
        count = rng.randint(2, MAX_PASSAGES)
        added, titled = rng.random() < ADDED_SHARE, rng.random() >= UNTITLED_SHARE
        return self.make(
            number, rng, count, without=without, added=added, titled=titled, typed=True
        )

    def _is_easy(self, number: int, rng: random.Random) -> bool:
        nearest = self.folder.nearest(number, rng, count=1)
        return nearest[0].row == self.folder.gold_row(self.folder.questions[number])

    def make(
        self,
        number: int,
        rng: random.Random,
        count: int,
        *,
        without: str = NOTHING,
        added: bool = False,
        titled: bool = True,
        typed: bool = False,
        exchanged: bool = False,
    ) -> Example | None:
        """Return an example with the passages of the nearest sentences.

        It is None if the answer is not among them, or there are none.

        Args:
            number: That of the question in the folder.
            rng: Draws the other paragraphs of the folder.
            count: The number of passages.
            without: What the folder does not hold, see ``Folder.nearest``. Passages that hold the
                answer in another sentence are left out too.
            added: Whether the answer's passage takes the last place if it is not among them.
            titled: Whether the passages have their titles.
            typed: Whether the question may be changed as by ``as_typed``.
            exchanged: Whether to ask for another name or number than the passages have, so that
                none of their sentences answers. It is None if the question has none that they have.
        """
        folder = self.folder
        question = folder.questions[number]
        nearest = folder.nearest(number, rng, without=without, count=NUM_RANKED)
        found = list(dict.fromkeys(folder.passage_of[one.row] for one in nearest))
        gold = folder.gold_row(question) if without == NOTHING else None
        if gold is None:
            found = [at for at in found if not folder.has_answer(at, question)]
        found = found[:count]
        if not found:  # a small folder of nothing but what answers
            return None
        if gold is not None and folder.passage_of[gold] not in found:
            if not added:
                return None
            found[-1:] = [folder.passage_of[gold]]
        pages = [
            (folder.title(own[0]) * titled, [folder.sentence(row) for row in own])
            for own in (folder.passages[passage] for passage in found)
        ]
        sentences = [row for passage in found for row in folder.passages[passage]]
        right = None if gold is None or exchanged else sentences.index(gold)
        text = question.text
        if exchanged:
            text = self._exchanged(question, pages, rng)
            if not text:
                return None
        text = as_typed(text, rng) if typed else text
        return _example(self.encode, text, pages, right, sentences)

    def _exchanged(self, question: Question, pages: Sequence[Page], rng: random.Random) -> str:
        """Return a question with a name or number that is not in the pages; empty without one."""
        told = " ".join(text for title, texts in pages for text in (title, *texts))
        known = [name for name in names_in(question.text) if _word(name).search(told)]
        if not known:
            return ""
        name = rng.choice(known)
        if name[0].isdigit():
            others = [
                re.sub(r"\d", lambda _: str(rng.randint(1, 9)), name) for _ in range(NUM_EXCHANGES)
            ]
        else:
            article = self.folder.corpus.paragraphs[question.paragraph].article
            names = self._names[article] if rng.random() < 0.5 else self._all_names
            others = rng.choices(names, k=NUM_EXCHANGES)
        other = next((one for one in others if not _word(one).search(told)), None)
        return "" if other is None else _word(name).sub(lambda _: other, question.text)

    def draw_page(self, maker: PageMaker, rng: random.Random) -> Example | None:
        """Return an example of a made-up page with passages of the folder."""
        asked = maker.draw(rng, answered=rng.random() >= WITHOUT_ANSWER_SHARE)
        if asked is None:
            return None
        folder = self.folder
        others = [rng.choice(folder.passages) for _ in range(rng.randint(0, 2))]
        pages = [*asked.pages]
        pages += [(folder.title(own[0]), [folder.sentence(row) for row in own]) for own in others]
        order = rng.sample(range(len(pages)), len(pages))
        before = sum(len(pages[at][1]) for at in order[: order.index(0)])
        right = None if asked.gold is None else before + asked.gold
        text = as_typed(asked.text, rng)
        return _example(self.encode, text, [pages[at] for at in order], right, [])


def _example(
    encode: Encode, text: str, pages: Sequence[Page], gold: int | None, sentences: list[int]
) -> Example:
    rows = [row for title, texts in pages for row in rows_of(encode, text, title, texts)]
    size = sum(len(texts) for _, texts in pages)
    return Example(rows, size, size if gold is None else gold, sentences)


def names_in(question: str) -> list[str]:
    """Return the names and numbers after the first word of a question."""
    return _NAMES.findall(question.partition(" ")[2])


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)


def as_typed(question: str, rng: random.Random) -> str:
    """Return a question as typed in haste: without its mark, as keywords, with a wrong letter."""
    if rng.random() < UNMARKED_SHARE:
        question = question.rstrip(" ?")
    words = question.split()
    if rng.random() < KEYWORDS_SHARE:
        frequent = frequent_words(language_of(question))
        words = [word for word in words if word.casefold().strip("?") not in frequent] or words
    if rng.random() < MISTYPED_SHARE:
        at = rng.randrange(len(words))
        words[at] = _mistyped(words[at], rng)
    return " ".join(words)


def _mistyped(word: str, rng: random.Random) -> str:
    """Return a word with two letters exchanged, or one twice or missing."""
    if len(word) < 5:
        return word
    at = rng.randrange(1, len(word) - 2)
    changed = rng.choice((word[at + 1] + word[at], word[at], word[at] * 2 + word[at + 1]))
    return word[:at] + changed + word[at + 2 :]


class TrainingExamples:
    """The examples of a training run: English questions of people, foreign ones, and pages."""

    def __init__(self, english: ExampleMaker, foreign: ExampleMaker) -> None:
        self.english, self.foreign = english, foreign
        self._pages = PageMaker(english.folder)

    @property
    def digest(self) -> str:
        """The digests of both corpora."""
        return " ".join(one.folder.corpus.digest() for one in (self.english, self.foreign))

    def draw(self, block: int, size: int, seed: int) -> list[Example]:
        """Return the examples of a block of questions; many of these have none."""
        rng = random.Random(f"{seed} {block}")
        drawn: list[Example | None] = []
        for maker, share in (
            (self.english, 1.0 - FOREIGN_SHARE - PAGES_SHARE),
            (self.foreign, FOREIGN_SHARE),
        ):
            count = round(size * share)
            numbers = islice(maker.folder.order(seed), block * count, (block + 1) * count)
            drawn += [maker.draw(number, rng) for number in numbers]
        count = round(size * PAGES_SHARE)
        drawn += [self.english.draw_page(self._pages, rng) for _ in range(count)]
        return [one for one in drawn if one is not None]
