"""Training examples: token ids of question, passages and answer, with the weights of the loss."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from ragaccel.errors import ConfigurationError
from recipes.reader.corpus import Article, HumanQuestion
from recipes.reader.entity_replacement import EntityReplacer, insert_near_copy
from recipes.reader.passages import Shape, TargetedQuestion, WordMatchedPassages
from recipes.reader.questions import make_question
from recipes.reader.retrieved import RetrievedPassages
from recipes.reader.sources import Piece, Source, Sources
from recipes.reader.vocabulary import (
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

if TYPE_CHECKING:
    from ragaccel.retrieval import Embedder

SOURCE_SHARES = {
    "hipporag_2wiki": 0.26,
    "wikitext2": 0.10,
    "factbook": 0.10,
    "tech_docs": 0.16,
    "books": 0.16,
}
REPLACED_SHARE, NEAR_COPY_SHARE = 0.4, 0.2
EMBEDDING_BATCH_SIZE = 64  # questions


@dataclass(slots=True)
class Example:
    """Token ids and the targets of the losses.

    Attributes:
        token_ids: Prompt and answer.
        answer_start: Position of ``<answer>``.
        targets: Weight of predicting the next token, by position.
        sentence_ends: Positions of closing markers.
        gold_end: Index in ``sentence_ends`` of the answering sentence.
        matches: Whether the question has the word of a sentence's token, in any inflection, by
            position.
        question: The question's text.
        origin: "made" for a generated question, else the name of its set.
    """

    token_ids: list[int]
    answer_start: int
    targets: dict[int, float]
    sentence_ends: list[int]
    gold_end: int
    matches: dict[int, bool]
    question: str = ""
    origin: str = "made"


class ExampleMaker:
    """A source of random training examples from tokenized articles and questions.

    Args:
        articles: Sources of generated questions.
        questions: Questions of people, with their passages.
        tokenizer: The reader's tokenizer.
        seed: Seed of all random choices.
        embedder: Retrieves passages; needed for shapes with ``max_sentences``.
        cache: A folder that keeps the vectors of all sentences.
        augmented: Whether to replace names and insert near-copies of answers, as in training.
    """

    def __init__(
        self,
        articles: Sequence[Article],
        questions: Sequence[HumanQuestion],
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int = 0,
        embedder: Embedder | None = None,
        cache: Path | None = None,
        augmented: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.sources = Sources(articles, questions, tokenizer)
        self.word_matched = WordMatchedPassages(self.sources, self.rng)
        self.retrieved = (
            RetrievedPassages(self.sources, self.rng, embedder, cache) if embedder else None
        )
        self.entity_replacer = EntityReplacer(tokenizer, self.rng) if augmented else None
        self._pending: dict[Shape, list[TargetedQuestion]] = {}
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.id_of = {t: vocabulary[t] for t in (BOS, EOS, QUESTION, PASSAGE, ANSWER, NONE)}
        self.markers = [vocabulary[token] for token in MARKERS]
        self.citations = [vocabulary[token] for token in CITATIONS]
        self.refusal = self.sources.encode(REFUSAL)
        self._kinds = [kind for kind in SOURCE_SHARES if self.sources.by_kind[kind]]
        self._cumulative = list(accumulate(SOURCE_SHARES[kind] for kind in self._kinds))

    def reseed(self, seed: int) -> None:
        """Restart with a seed, so that it always draws the same examples."""
        self.rng.seed(seed)
        self._pending.clear()

    def make(self, shape: Shape) -> Example:
        """Draw one example of at most ``shape.length`` tokens."""
        while True:
            example = self._try(shape)
            if example is not None:
                return example

    def _try(self, shape: Shape) -> Example | None:
        asked = self._draw_retrievable(shape) if shape.max_sentences else self._draw_question(shape)
        if asked is None:
            return None
        question_ids = self.sources.encode(asked.question)
        gold_length = len(asked.source.sentences[asked.gold].ids)
        room = shape.length - 2 * len(question_ids) - gold_length - 24
        answerable = self.rng.random() >= shape.unanswerable_share
        chosen = self._retriever if shape.max_sentences else self.word_matched
        pieces = chosen.choose(asked, shape, room=room, answerable=answerable)
        if pieces is None or len(pieces) < max(1, shape.min_passages):
            return None
        gold = (asked.source, asked.gold) if answerable else None
        if self.entity_replacer and gold and self.rng.random() < NEAR_COPY_SHARE:
            stems = set(self.sources.stems(question_ids)) - {""}
            near_copy = self.entity_replacer.near_copy(asked.source.sentences[asked.gold], stems)
            pieces = insert_near_copy(self.rng, pieces, gold, near_copy) if near_copy else pieces
        example = self._assemble(question_ids, pieces, gold)
        if len(example.token_ids) > shape.length:
            return None
        example.question, example.origin = asked.question, asked.origin
        return example

    @property
    def _retriever(self) -> RetrievedPassages:
        if self.retrieved is None:
            raise ConfigurationError(
                "a shape with max_sentences needs retrieved passages: pass embedder="
            )
        return self.retrieved

    def _draw_retrievable(self, shape: Shape) -> TargetedQuestion:
        """Return a question whose passages can be retrieved; questions are embedded in batches."""
        pending = self._pending.setdefault(shape, [])
        if not pending:
            while len(pending) < EMBEDDING_BATCH_SIZE:
                asked = self._draw_question(shape)
                if asked is not None and self._retriever.has(asked.source):
                    pending.append(asked)
            self._retriever.embed(pending)
        return pending.pop()

    def _draw_question(self, shape: Shape) -> TargetedQuestion | None:
        rng = self.rng
        source = self._source(shape.human_share)
        if source.questions:
            own = rng.choice(source.questions)
            return TargetedQuestion(own.question, source, own.gold, own.source, own.answer)
        gold = rng.randrange(len(source.sentences))
        made = make_question(rng, source.sentences[gold].text, source.title, self._any_sentence())
        return None if made is None else TargetedQuestion(made, source, gold, "made")

    def _source(self, human_share: float) -> Source:
        rng, people = self.rng, self.sources.by_kind["human"]
        if not self._kinds or (people and rng.random() < human_share):
            return rng.choice(people)
        kind = self._kinds[bisect(self._cumulative, rng.random() * self._cumulative[-1])]
        return rng.choice(self.sources.by_kind[kind])

    def _any_sentence(self) -> str:
        return self.rng.choice(self.rng.choice(self.sources.everything).sentences).text

    def _assemble(
        self, question_ids: list[int], pieces: list[Piece], gold: tuple[Source, int] | None
    ) -> Example:
        rng, id_of = self.rng, self.id_of
        asked = set(self.sources.stems(question_ids)) - {""}
        replace = self._replacement(question_ids)
        question_ids = replace(question_ids)
        number = rng.randrange(len(self.markers)) if rng.random() < 0.5 else 0
        ids = [id_of[BOS], id_of[QUESTION], *question_ids]
        matches: dict[int, bool] = {}
        ends: list[int] = []
        answer: list[int] = []
        gold_end = -1
        for citation, piece in zip(self.citations, pieces, strict=False):
            title = self.sources.title_ids(piece.source.title)
            ids += [id_of[PASSAGE], *replace(title)]
            for i in range(piece.start, piece.end):
                marker = self.markers[number % len(self.markers)]
                number += 1
                sentence = piece.source.sentences[i]
                block = [marker, *replace(sentence.ids), citation]
                here = enumerate(sentence.stems, start=len(ids) + 1)
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
        targets = dict.fromkeys(range(prompt_end, answer_start - 1), 0.5)  # the repeated question
        targets |= {i: 0.2 for i in range(prompt_end) if rng.random() < 0.1}
        targets |= dict.fromkeys(range(answer_start, len(ids) - 1), 1.0)
        return Example(ids, answer_start, targets, ends, gold_end, matches)

    def _replacement(self, question_ids: list[int]) -> Callable[[list[int]], list[int]]:
        """Return a function that replaces the names of one example; most examples keep theirs.

        A question without a name keeps all names: it may have one in lower case, which would no
        longer match the replaced one.
        """
        entity_replacer = self.entity_replacer
        if entity_replacer is None or not entity_replacer.names(question_ids):
            return lambda ids: ids
        if self.rng.random() >= REPLACED_SHARE:
            return lambda ids: ids
        other: dict[int, int] = {}
        return lambda ids: entity_replacer.replace(ids, other)
