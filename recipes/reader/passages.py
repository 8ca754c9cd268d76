"""Whole passages of an example: the answering one and distractors."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from recipes.reader.sources import Piece, Source, Sources


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and shares of one kind of training example."""

    length: int  # tokens of the example
    max_passages: int
    max_passage_tokens: int  # of whole passages
    min_passages: int = 1
    human_share: float = 0.22  # share of questions by people
    # of a retrieved passage, which is cut to them; 0: whole passages, found by words
    max_sentences: int = 0
    unanswerable_share: float = 0.08


@dataclass(slots=True)
class TargetedQuestion:
    """A question and the sentence that answers it; ``origin`` is "made" or a question set."""

    question: str
    source: Source
    gold: int
    origin: str
    answer: str = ""  # the short answer to a question of people
    # [D], if passages are retrieved
    vector: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def text(self) -> str:
        """Return the sentence that answers."""
        return self.source.sentences[self.gold].text


class WordMatchedPassages:
    """A source of whole passages; many share an article or rare words with the question."""

    def __init__(self, sources: Sources, rng: random.Random) -> None:
        self.sources, self.rng = sources, rng

    def choose(
        self, asked: TargetedQuestion, shape: Shape, *, room: int, answerable: bool
    ) -> list[Piece] | None:
        """Draw passages of at most ``room`` tokens, the answering one among them if answerable."""
        rng = self.rng
        minimum = max(shape.min_passages, rng.choice((1, 2, 2)))
        num_passages = rng.randint(minimum, shape.max_passages)
        budget = min(room // num_passages, shape.max_passage_tokens)
        piece = draw_span(rng, asked.source, asked.gold, budget)
        if piece is None:
            return None
        is_close = (
            answerable or rng.random() < 0.5
        )  # distractors of an unanswerable question may be unrelated
        pieces = [piece] if answerable else []
        for _ in range(3 * num_passages):
            if len(pieces) == num_passages:
                break
            left = room - sum(self.sources.length(p) for p in pieces)
            share = min(left // (num_passages - len(pieces)), shape.max_passage_tokens)
            other = self._distractor(piece, asked.question if is_close else "", share)
            if other is not None and not repeats(other, pieces, asked.text):
                pieces.append(other)
        self._order(pieces, asked.question)
        return pieces

    def _distractor(self, gold: Piece, question: str, budget: int) -> Piece | None:
        rng, sources = self.rng, self.sources
        draw = rng.random()
        other: Source | None = None
        place = 0
        if draw < 0.35 and question:
            other = rng.choice(sources.of_title[gold.source.title])
            place = rng.randrange(len(other.sentences))
        elif draw < 0.8:
            words = [w for w in re.findall(r"\w{4,}", question.lower()) if w in sources.occurrences]
            if words:
                weights = [1 / len(sources.occurrences[w]) ** 0.5 for w in words]
                other, place = rng.choice(sources.occurrences[rng.choices(words, weights)[0]])
        if other is None:
            other = rng.choice(sources.everything)
            place = rng.randrange(len(other.sentences))
        piece = draw_span(rng, other, place, rng.randint(3 * budget // 4, budget))
        if piece is None or _overlap(piece, gold):
            return None
        return piece

    def _order(self, pieces: list[Piece], question: str) -> None:
        """Order passages at random, or half of the time by matching words, as a retriever would."""
        self.rng.shuffle(pieces)
        if self.rng.random() < 0.5:
            return
        asked = set(re.findall(r"\w{3,}", question.lower()))

        def score(piece: Piece) -> float:
            texts = " ".join(s.text for s in piece.source.sentences[piece.start : piece.end])
            found = asked & set(re.findall(r"\w{3,}", (texts + " " + piece.source.title).lower()))
            return math.fsum((1 + len(self.sources.occurrences.get(w, ()))) ** -0.5 for w in found)

        pieces.sort(key=score, reverse=True)


def draw_span(rng: random.Random, source: Source, gold: int, budget: int) -> Piece | None:
    """Draw a run of sentences around ``gold`` within a budget of tokens.

    Return None if the sentence ``gold`` alone exceeds the budget.
    """
    start, end = gold, gold + 1
    used = len(source.sentences[gold].ids) + 3
    if used > budget:
        return None
    while True:
        sides = [start - 1] * (start > 0) + [end] * (end < len(source.sentences))
        sides = [i for i in sides if used + len(source.sentences[i].ids) + 3 <= budget]
        if not sides:
            return Piece(source, start, end)
        i = rng.choice(sides)
        used += len(source.sentences[i].ids) + 3
        start, end = min(start, i), max(end, i + 1)


def repeats(piece: Piece, others: list[Piece], gold_text: str) -> bool:
    """Return whether a passage overlaps one of ``others`` or contains the answering sentence."""
    if any(_overlap(piece, other) for other in others):
        return True
    return any(s.text == gold_text for s in piece.source.sentences[piece.start : piece.end])


def _overlap(one: Piece, other: Piece) -> bool:
    return one.source is other.source and one.start < other.end and other.start < one.end
