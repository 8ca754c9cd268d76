"""Training examples: passages as in use, and which of their sentences answers the question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Tokenizer

from ragaccel.retrieval.sentence_ranker import Row, rows_of
from recipes.reader.folder import ANSWER, ARTICLE, NOTHING, NUM_RANKED, Folder

MAX_PASSAGES = 4  # of an example, two at least
WITHOUT_ANSWER_SHARE, OFF_TOPIC_SHARE = 0.20, 0.03
ADDED_SHARE = 0.5  # of the questions whose passage is not among the nearest: it takes a place
UNTITLED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Example:
    """A question with passages.

    Attributes:
        number: That of the question in the folder.
        rows: As ``rows_of`` returns them, of all passages.
        sentences: The folder's rows of the sentences, in the same order.
        gold: Index of the right one; their number if none is.
    """

    number: int
    rows: list[Row]
    sentences: list[int]
    gold: int


class ExampleMaker:
    """Makes examples of a folder's questions."""

    def __init__(self, folder: Folder, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self.encode = lru_cache(1 << 18)(self._encode)

    def _encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def draw(self, number: int, rng: random.Random) -> Example | None:
        """Return an example as in training, or None if the answer is not among its passages."""
        chance = rng.random()
        without = NOTHING
        if chance < WITHOUT_ANSWER_SHARE + OFF_TOPIC_SHARE:
            without = ARTICLE if chance < OFF_TOPIC_SHARE else ANSWER
        count = rng.randint(2, MAX_PASSAGES)
        added, titled = rng.random() < ADDED_SHARE, rng.random() >= UNTITLED_SHARE
        return self.make(number, rng, count, without=without, added=added, titled=titled)

    def make(
        self,
        number: int,
        rng: random.Random,
        count: int,
        *,
        without: str = NOTHING,
        added: bool = False,
        titled: bool = True,
    ) -> Example | None:
        """Return an example with the passages of the nearest sentences.

        It is None if the answer is not among them, or there are none.

        Args:
            number: That of the question in the folder.
            rng: Draws the other paragraphs of the folder.
            count: The number of passages.
            without: What the folder does not hold, see ``Folder.nearest``.
            added: Whether the answer's passage takes the last place if it is not among them.
            titled: Whether the passages have their titles.
        """
        folder = self.folder
        question = folder.questions[number]
        nearest = folder.nearest(number, rng, without=without, count=NUM_RANKED)
        found = list(dict.fromkeys(folder.passage_of[one.row] for one in nearest))[:count]
        if not found:  # a small folder of nothing but what answers
            return None
        gold = None if without != NOTHING else folder.gold_row(question)
        if gold is not None and folder.passage_of[gold] not in found:
            if not added:
                return None
            found[-1:] = [folder.passage_of[gold]]
        rows: list[Row] = []
        for passage in found:
            own = folder.passages[passage]
            title = folder.title(own[0]) * titled
            texts = [folder.sentence(row) for row in own]
            rows += rows_of(self.encode, question.text, title, texts)
        sentences = [row for passage in found for row in folder.passages[passage]]
        right = len(sentences) if gold is None else sentences.index(gold)
        return Example(number, rows, sentences, right)
