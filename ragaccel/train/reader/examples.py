"""Training examples: question, passages and the answering sentence, as ids with their losses."""

from __future__ import annotations

import math
import random
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from transformers import PreTrainedTokenizerFast

from ragaccel.train.reader.corpus import Article, HumanQuestion
from ragaccel.train.reader.questions import make_question, stem
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
HUMAN_SHARE = 0.22
UNANSWERABLE_SHARE = 0.12


@dataclass(frozen=True, slots=True)
class Shape:
    """How large examples are: tokens in all, passages, tokens a passage."""

    length: int
    max_passages: int
    max_passage_tokens: int
    min_passages: int = 1


@dataclass(slots=True)
class Text:
    """A sentence with its token ids, a space before it."""

    text: str
    ids: list[int]
    stems: list[str]  # of the word each token belongs to; empty for function words


@dataclass(slots=True)
class Source:
    """An article, tokenized. ``questions`` are people's own about it."""

    title: str
    sentences: list[Text]
    kind: str
    questions: list[HumanQuestion] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """A passage of an example."""

    source: Source
    start: int
    end: int


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
        self._titles: dict[str, list[int]] = {}
        self.tokenizer = tokenizer
        special = [BOS, EOS, QUESTION, PASSAGE, ANSWER, NONE]
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._pieces = {index: token for token, index in vocabulary.items()}
        self.id_of = {token: vocabulary[token] for token in special}
        self.markers = [vocabulary[token] for token in MARKERS]
        self.citations = [vocabulary[token] for token in CITATIONS]
        self.refusal: list[int] = self._encode([" " + REFUSAL])[0]
        self.by_kind: dict[str, list[Source]] = defaultdict(list)
        self._load(articles, questions)
        self.kinds = [k for k in SOURCE_SHARES if self.by_kind[k]]
        shares = [SOURCE_SHARES[k] for k in self.kinds]
        if self.by_kind["human"]:
            self.kinds.append("human")
            shares.append(HUMAN_SHARE)
        self._cumulative = list(accumulate(shares))
        self.everything = [s for kind in self.kinds for s in self.by_kind[kind]]
        self._index_words()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = []
        for i in range(0, len(texts), 20_000):
            encoded += self.tokenizer(texts[i : i + 20_000], add_special_tokens=False)["input_ids"]
        return encoded

    def _load(self, articles: Sequence[Article], questions: Sequence[HumanQuestion]) -> None:
        asked: dict[tuple[str, ...], Source] = {}
        sources = [
            (article, Source(article.title, [], article.source.split("/")[0]))
            for article in articles
        ]
        texts: list[tuple[str, Source]] = [(t, s) for a, s in sources for t in a.sentences]
        for question in questions:
            source = asked.get(question.sentences)
            if source is None:
                source = asked[question.sentences] = Source(question.title, [], "human")
                texts += [(t, source) for t in question.sentences]
            source.questions.append(question)
        for (text, source), ids in zip(
            texts, self._encode([" " + t for t, _ in texts]), strict=True
        ):
            source.sentences.append(Text(text, ids, self._stems(ids)))
        for source in [*(s for _, s in sources), *asked.values()]:
            self.by_kind[source.kind].append(source)

    def _stems(self, ids: list[int]) -> list[str]:
        """The stem of the word that each token is part of."""
        stems: list[str] = []
        pieces = [self._pieces[i] for i in ids]
        starts = [i for i, piece in enumerate(pieces) if i == 0 or piece.startswith("Ġ")]
        for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True):
            stems += [stem("".join(pieces[start:end]))] * (end - start)
        return stems

    def _index_words(self) -> None:
        """Where each rarer word stands, to find passages that share words with a question."""
        self.places: dict[str, list[tuple[Source, int]]] = defaultdict(list)
        self.of_title: dict[str, list[Source]] = defaultdict(list)
        for source in self.everything:
            self.of_title[source.title].append(source)
            for i, sentence in enumerate(source.sentences):
                for word in set(re.findall(r"\w{4,}", sentence.text.lower())):
                    if len(places := self.places[word]) < 400:
                        places.append((source, i))

    def make(self, shape: Shape) -> Example:
        """Draw one example of at most ``shape.length`` tokens."""
        while True:
            example = self._try(shape)
            if example is not None:
                return example

    def _try(self, shape: Shape) -> Example | None:
        rng = self.rng
        kind = self.kinds[bisect(self._cumulative, rng.random() * self._cumulative[-1])]
        source = rng.choice(self.by_kind[kind])
        if source.questions:
            asked = rng.choice(source.questions)
            question, gold = asked.question, asked.gold
            asked_in = asked.source
        else:
            gold = rng.randrange(len(source.sentences))
            made = make_question(rng, source.sentences[gold].text, source.title)
            if made is None:
                return None
            question, asked_in = made, "made"
        question_ids = self._encode([" " + question])[0]
        room = shape.length - 2 * len(question_ids) - len(source.sentences[gold].ids) - 24
        least = max(shape.min_passages, rng.choice((1, 2, 2)))
        num_passages = rng.randint(least, shape.max_passages)
        budget = min(room // num_passages, shape.max_passage_tokens)
        piece = self._around(source, gold, budget)
        if piece is None:
            return None
        answerable = rng.random() >= UNANSWERABLE_SHARE
        pieces = [piece] if answerable else []
        gold_text = source.sentences[gold].text
        for _ in range(3 * num_passages):
            if len(pieces) == num_passages:
                break
            left = room - sum(self._length(p) for p in pieces)
            share = min(left // (num_passages - len(pieces)), shape.max_passage_tokens)
            other = self._distractor(source, piece, question, share)
            if other is not None and not _repeats(other, pieces, gold_text):
                pieces.append(other)
        if len(pieces) < shape.min_passages:
            return None
        self._order(pieces, question)
        example = self._assemble(question_ids, pieces, (source, gold) if answerable else None)
        example.question, example.asked_in = question, asked_in
        return example if len(example.token_ids) <= shape.length else None

    def _length(self, piece: Piece) -> int:
        sentences = piece.source.sentences[piece.start : piece.end]
        return len(self._title(piece.source.title)) + 1 + sum(len(s.ids) + 3 for s in sentences)

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
        if draw < 0.35:
            same = self.of_title[source.title]
            other = self.rng.choice(same)
            place = self.rng.randrange(len(other.sentences))
        elif draw < 0.8:
            words = [w for w in re.findall(r"\w{4,}", question.lower()) if w in self.places]
            if words:
                weights = [1 / len(self.places[w]) ** 0.5 for w in words]
                other, place = self.rng.choice(self.places[self.rng.choices(words, weights)[0]])
        if other is None:
            other = self.rng.choice(self.everything)
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
            return math.fsum((1 + len(self.places.get(w, ()))) ** -0.5 for w in found)

        pieces.sort(key=score, reverse=True)

    def _assemble(
        self, question_ids: list[int], pieces: list[Piece], gold: tuple[Source, int] | None
    ) -> Example:
        rng, id_of = self.rng, self.id_of
        number = rng.randrange(len(self.markers)) if rng.random() < 0.5 else 0
        ids = [id_of[BOS], id_of[QUESTION], *question_ids]
        asked = set(self._stems(question_ids)) - {""}
        matches: dict[int, bool] = {}
        ends: list[int] = []
        answer: list[int] = []
        gold_end = -1
        for citation, piece in zip(self.citations, pieces, strict=False):
            ids += [id_of[PASSAGE], *self._title(piece.source.title)]
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

    def _title(self, title: str) -> list[int]:
        if not title:
            return []
        if title not in self._titles:
            self._titles[title] = self._encode([" " + title])[0][:16]
        return self._titles[title]


def _repeats(piece: Piece, others: list[Piece], gold_text: str) -> bool:
    """Whether a passage overlaps another one or holds the sentence that answers."""
    if any(
        piece.source is o.source and piece.start < o.end and o.start < piece.end for o in others
    ):
        return True
    return any(s.text == gold_text for s in piece.source.sentences[piece.start : piece.end])
