"""Training examples: the token ids of a prompt as in use, and which sentence is right."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from ragaccel.prompt import shorten_title
from recipes.minilm_reader.corpus import Question
from recipes.minilm_reader.nearest import ANSWER, ARTICLE, NOTHING, Folder
from recipes.minilm_reader.vocabulary import (
    ANSWER as ANSWER_TOKEN,
    BOS,
    CITATIONS,
    EOS,
    MARKERS,
    NONE,
    PASSAGE,
    QUESTION,
    REFUSAL,
)

MAX_CANDIDATES, MIN_CANDIDATES = 5, 3
MAX_TOKENS = 460
UNANSWERABLE_SHARE = 0.09  # half without the answer's paragraph, half without its article
WHOLE_SHARE = 0.08  # of prompts with whole passages
# A sentence that search did not find among the nearest is added as the last of them in this share
# of the cases; the other questions are not asked.
ADDED_SHARE = 0.25
# So many prompts are in random order: else the order of the sentences, which is right for most
# questions, is learned and nothing else.
SHUFFLED_SHARE = 0.5
SHARE_OF_SET = {"qamr": 0.3}  # their passages are single sentences
Group = tuple[int, list[int]]  # a paragraph and the rows of its sentences


@dataclass(slots=True)
class Example:
    """A prompt with its answer.

    Attributes:
        token_ids: Prompt, answer and end token.
        answer_start: Index of the last token of the prompt, whose successor is the answer's first.
        sentence_ends: Index of each sentence's closing marker; that of the refusal is last.
        gold: Index in ``sentence_ends`` of the right one.
        question: The question.
        found: (row, similarity) of each sentence, without the refusal.
    """

    token_ids: list[int]
    answer_start: int
    sentence_ends: list[int]
    gold: int
    question: Question
    found: list[tuple[int, float]]


class ExampleMaker:
    """Makes prompts of a folder's questions."""

    def __init__(self, folder: Folder, tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder = folder
        vocabulary = tokenizer.get_vocab()
        self.id_of = {
            token: vocabulary[token] for token in (BOS, EOS, QUESTION, PASSAGE, ANSWER_TOKEN, NONE)
        }
        self._markers = [vocabulary[token] for token in MARKERS]
        self._citations = [vocabulary[token] for token in CITATIONS]
        encode = tokenizer.backend_tokenizer.encode_batch
        corpus = folder.corpus
        texts = [s for i in folder.paragraphs for s in corpus.paragraphs[i].sentences]
        self._sentences = [one.ids for one in encode([f" {text}" for text in texts])]
        titles = sorted({corpus.paragraphs[i].title for i in folder.paragraphs})
        shown = encode([f" {shorten_title(title)}" if title else "" for title in titles])
        self._titles = dict(zip(titles, (one.ids for one in shown), strict=True))
        asked = encode([f" {question.text}" for question in folder.questions])
        self._questions = [one.ids for one in asked]
        self._refusal = tokenizer.backend_tokenizer.encode(f" {REFUSAL}").ids

    def shuffled(self, seed: int) -> Iterator[Example]:
        """Yield an example of each question of all epochs, for ever; the seed fixes all of them."""
        rng = random.Random(seed)
        while True:
            order = list(range(len(self.folder.questions)))
            rng.shuffle(order)
            for number in order:
                source = self.folder.questions[number].source
                if rng.random() < SHARE_OF_SET.get(source, 1.0):
                    made = self.draw(number, rng)
                    if made is not None:
                        yield made

    def draw(self, number: int, rng: random.Random) -> Example | None:
        """Return an example as in training, or None if the sentence is not found or too long."""
        chance = rng.random()
        without = NOTHING
        if chance < UNANSWERABLE_SHARE:
            without = ANSWER if chance < UNANSWERABLE_SHARE / 2 else ARTICLE
        count = rng.randint(MIN_CANDIDATES, MAX_CANDIDATES)
        whole = rng.random() < WHOLE_SHARE
        added = rng.random() < ADDED_SHARE
        return self.make(
            number, rng, count, without=without, whole=whole, added=added,
            shuffled=rng.random() < SHUFFLED_SHARE,
        )  # fmt: skip

    def make(
        self,
        number: int,
        rng: random.Random,
        count: int,
        *,
        without: str = NOTHING,
        whole: bool = False,
        added: bool = False,
        shuffled: bool = False,
    ) -> Example | None:
        """Return an example with the ``count`` nearest sentences, or None if none can be made."""
        folder = self.folder
        question = folder.questions[number]
        nearest = folder.nearest(number, rng, without=without)
        gold = None if without != NOTHING else folder.gold_row(question)
        if whole:
            groups = self._whole(nearest)
        else:
            kept = [row for row, _ in nearest[:count]]
            if gold is not None and gold not in kept and added:
                kept[-1] = gold
            if shuffled:
                rng.shuffle(kept)
            groups = [(folder.paragraph_of(row), [row]) for row in kept]
        rows = [row for _, group in groups for row in group]
        if gold is not None and gold not in rows:
            return None
        similarity = dict(nearest)
        made = self._written(number, groups, gold)
        made.found = [(row, similarity.get(row, 0.0)) for row in rows]
        return made if len(made.token_ids) <= MAX_TOKENS else None

    def _whole(self, nearest: Sequence[tuple[int, float]]) -> list[Group]:
        """Return whole paragraphs, that of the nearest sentence first, as many as have room."""
        folder = self.folder
        groups: list[Group] = []
        room = 300
        for paragraph in dict.fromkeys(folder.paragraph_of(row) for row, _ in nearest):
            first = folder.first_row[paragraph]
            rows = list(range(first, first + len(folder.corpus.paragraphs[paragraph].sentences)))
            size = sum(len(self._sentences[row]) + 3 for row in rows)
            if size <= room:
                groups.append((paragraph, rows))
                room -= size
        return groups

    def _written(self, number: int, groups: Sequence[Group], gold: int | None) -> Example:
        ids = [self.id_of[BOS], self.id_of[QUESTION], *self._questions[number]]
        ends: list[int] = []
        answer: list[int] = []
        right = -1
        for place, (paragraph, rows) in enumerate(groups):
            title = self.folder.corpus.paragraphs[paragraph].title
            ids += [self.id_of[PASSAGE], *self._titles[title]]
            for row in rows:
                marker = self._markers[len(ends)]
                citation = self._citations[min(place, len(self._citations) - 1)]
                written = [marker, *self._sentences[row], citation, marker]
                if row == gold:
                    answer, right = written, len(ends)
                ids += written
                ends.append(len(ids) - 1)
        none = [self.id_of[NONE], *self._refusal, self.id_of[NONE]]
        ids += none
        ends.append(len(ids) - 1)
        if gold is None:
            answer, right = none, len(ends) - 1
        ids += [self.id_of[QUESTION], *self._questions[number], self.id_of[ANSWER_TOKEN]]
        start = len(ids) - 1
        ids += [*answer, self.id_of[EOS]]
        return Example(ids, start, ends, right, self.folder.questions[number], [])
