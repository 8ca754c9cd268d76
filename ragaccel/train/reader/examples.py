"""Training examples: question, passages and the answering sentence, as ids with their losses."""

from __future__ import annotations

import math
import random
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerFast

from ragaccel.train.reader.corpus import Article, HumanQuestion
from ragaccel.train.reader.questions import make_question
from ragaccel.train.reader.sources import Piece, Source, Sources
from ragaccel.train.reader.vocabulary import (
    ANSWER,
    BOS,
    CITATIONS,
    EOS,
    MARKERS,
    NONE,
    PASSAGE,
    QUESTION,
    REFUSAL,
)  # fmt: skip

SOURCE_SHARES = {
    "hipporag_2wiki": 0.26,
    "wikitext2": 0.10,
    "factbook": 0.10,
    "tech_docs": 0.16,
    "books": 0.16,
}
UNANSWERABLE_SHARE = 0.08


@dataclass(frozen=True, slots=True)
class Shape:
    """How large examples are: tokens in all, passages, tokens a passage; and who asks."""

    length: int
    max_passages: int
    max_passage_tokens: int
    min_passages: int = 1
    human_share: float = 0.22  # of the questions, people's own


@dataclass(slots=True)
class Example:
    """Token ids and where the losses are.

    ``targets`` maps a position to the weight of predicting the token after it; ``sentence_ends``
    are the positions of closing markers, ``gold_end`` the index among them of the answer.
    ``matches`` says of sentence tokens whether the question has their word, in any inflection.
    """

    token_ids: list[int]
    answer_start: int  # the position of <answer>
    targets: dict[int, float]
    sentence_ends: list[int]
    gold_end: int
    matches: dict[int, bool]
    question: str = ""
    asked_in: str = "made"  # or the set that a person's question is from


class ExampleMaker:
    """Draws examples from tokenized sources; distractors share words with the question."""

    def __init__(
        self,
        articles: Sequence[Article],
        questions: Sequence[HumanQuestion],
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.sources = Sources(articles, questions, tokenizer)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.id_of = {t: vocabulary[t] for t in (BOS, EOS, QUESTION, PASSAGE, ANSWER, NONE)}
        self.markers = [vocabulary[token] for token in MARKERS]
        self.citations = [vocabulary[token] for token in CITATIONS]
        self.refusal = self.sources.encode(REFUSAL)
        self._kinds = [kind for kind in SOURCE_SHARES if self.sources.by_kind[kind]]
        self._cumulative = list(accumulate(SOURCE_SHARES[kind] for kind in self._kinds))

    def make(self, shape: Shape) -> Example:
        """Draw one example of at most ``shape.length`` tokens."""
        while True:
            example = self._try(shape)
            if example is not None:
                return example

    def _try(self, shape: Shape) -> Example | None:
        rng = self.rng
        source = self._source(shape.human_share)
        if source.questions:
            asked = rng.choice(source.questions)
            question, gold = asked.question, asked.gold
            asked_in = asked.source
        else:
            gold = rng.randrange(len(source.sentences))
            made = make_question(
                rng, source.sentences[gold].text, source.title, self._any_sentence()
            )
            if made is None:
                return None
            question, asked_in = made, "made"
        question_ids = self.sources.encode(question)
        room = shape.length - 2 * len(question_ids) - len(source.sentences[gold].ids) - 24
        least = max(shape.min_passages, rng.choice((1, 2, 2)))
        num_passages = rng.randint(least, shape.max_passages)
        budget = min(room // num_passages, shape.max_passage_tokens)
        piece = self._around(source, gold, budget)
        if piece is None:
            return None
        answerable = rng.random() >= UNANSWERABLE_SHARE
        is_close = answerable or rng.random() < 0.5  # what cannot be answered may be far off, too
        pieces = [piece] if answerable else []
        gold_text = source.sentences[gold].text
        for _ in range(3 * num_passages):
            if len(pieces) == num_passages:
                break
            left = room - sum(self.sources.length(p) for p in pieces)
            share = min(left // (num_passages - len(pieces)), shape.max_passage_tokens)
            other = self._distractor(source, piece, question if is_close else "", share)
            if other is not None and not _repeats(other, pieces, gold_text):
                pieces.append(other)
        if len(pieces) < shape.min_passages:
            return None
        self._order(pieces, question)
        example = self._assemble(question_ids, pieces, (source, gold) if answerable else None)
        example.question, example.asked_in = question, asked_in
        return example if len(example.token_ids) <= shape.length else None

    def _source(self, human_share: float) -> Source:
        rng, people = self.rng, self.sources.by_kind["human"]
        if not self._kinds or (people and rng.random() < human_share):
            return rng.choice(people)
        kind = self._kinds[bisect(self._cumulative, rng.random() * self._cumulative[-1])]
        return rng.choice(self.sources.by_kind[kind])

    def _any_sentence(self) -> str:
        return self.rng.choice(self.rng.choice(self.sources.everything).sentences).text

    def _around(self, source: Source, gold: int, budget: int) -> Piece | None:
        """A run of sentences that holds ``gold``, within the budget of tokens."""
        start, end = gold, gold + 1
        used = len(source.sentences[gold].ids) + 3
        if used > budget:
            return None
        while True:
            sides = [start - 1] * (start > 0) + [end] * (end < len(source.sentences))
            sides = [i for i in sides if used + len(source.sentences[i].ids) + 3 <= budget]
            if not sides:
                return Piece(source, start, end)
            i = self.rng.choice(sides)
            used += len(source.sentences[i].ids) + 3
            start, end = min(start, i), max(end, i + 1)

    def _distractor(self, source: Source, gold: Piece, question: str, budget: int) -> Piece | None:
        draw = self.rng.random()
        other: Source | None = None
        place = 0
        if draw < 0.35 and question:
            same = self.sources.of_title[source.title]
            other = self.rng.choice(same)
            place = self.rng.randrange(len(other.sentences))
        elif draw < 0.8:
            words = [w for w in re.findall(r"\w{4,}", question.lower()) if w in self.sources.places]
            if words:
                weights = [1 / len(self.sources.places[w]) ** 0.5 for w in words]
                other, place = self.rng.choice(
                    self.sources.places[self.rng.choices(words, weights)[0]]
                )
        if other is None:
            other = self.rng.choice(self.sources.everything)
            place = self.rng.randrange(len(other.sentences))
        piece = self._around(other, place, self.rng.randint(3 * budget // 4, budget))
        if piece is None or (other is source and piece.start < gold.end and gold.start < piece.end):
            return None
        return piece

    def _order(self, pieces: list[Piece], question: str) -> None:
        """Half the time best match first, as a retriever would rank them; else at random."""
        self.rng.shuffle(pieces)
        if self.rng.random() < 0.5:
            return
        asked = set(re.findall(r"\w{3,}", question.lower()))

        def score(piece: Piece) -> float:
            texts = " ".join(s.text for s in piece.source.sentences[piece.start : piece.end])
            found = asked & set(re.findall(r"\w{3,}", (texts + " " + piece.source.title).lower()))
            return math.fsum((1 + len(self.sources.places.get(w, ()))) ** -0.5 for w in found)

        pieces.sort(key=score, reverse=True)

    def _assemble(
        self, question_ids: list[int], pieces: list[Piece], gold: tuple[Source, int] | None
    ) -> Example:
        rng, id_of = self.rng, self.id_of
        number = rng.randrange(len(self.markers)) if rng.random() < 0.5 else 0
        ids = [id_of[BOS], id_of[QUESTION], *question_ids]
        asked = set(self.sources.stems(question_ids)) - {""}
        matches: dict[int, bool] = {}
        ends: list[int] = []
        answer: list[int] = []
        gold_end = -1
        for citation, piece in zip(self.citations, pieces, strict=False):
            ids += [id_of[PASSAGE], *self.sources.title_ids(piece.source.title)]
            for i in range(piece.start, piece.end):
                marker = self.markers[number % len(self.markers)]
                number += 1
                block = [marker, *piece.source.sentences[i].ids, citation]
                here = enumerate(piece.source.sentences[i].stems, start=len(ids) + 1)
                matches |= {position: word in asked for position, word in here}
                ids += [*block, marker]
                ends.append(len(ids) - 1)
                if gold is not None and piece.source is gold[0] and i == gold[1]:
                    answer, gold_end = block, len(ends) - 1
        none = [id_of[NONE], *self.refusal]
        ids += [*none, id_of[NONE]]
        ends.append(len(ids) - 1)
        if gold is None:
            answer, gold_end = none, len(ends) - 1
        prompt_end = len(ids)
        ids += [id_of[QUESTION], *question_ids, id_of[ANSWER]]
        answer_start = len(ids) - 1
        ids += [*answer, id_of[EOS]]
        targets = dict.fromkeys(range(prompt_end, answer_start - 1), 0.5)  # the question again
        targets |= {i: 0.2 for i in range(prompt_end) if rng.random() < 0.1}
        targets |= dict.fromkeys(range(answer_start, len(ids) - 1), 1.0)
        targets[answer_start] = 4.0
        return Example(ids, answer_start, targets, ends, gold_end, matches)


def _repeats(piece: Piece, others: list[Piece], gold_text: str) -> bool:
    """Whether a passage overlaps another one or holds the sentence that answers."""
    if any(
        piece.source is o.source and piece.start < o.end and o.start < piece.end for o in others
    ):
        return True
    return any(s.text == gold_text for s in piece.source.sentences[piece.start : piece.end])
