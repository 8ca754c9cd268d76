"""Training examples: the token ids of a prompt as in use, and which sentence is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerFast

from ragaccel.prompt import shorten_title
from recipes.reader.corpus import Question
from recipes.reader.folder import ANSWER, ARTICLE, NOTHING, Folder, Nearest, content_words
from recipes.reader.vocabulary import (
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

NUM_SENTENCES, FULL_SHARE = 5, 0.7  # as in use; of prompts with fewer, two at least
MAX_TOKENS, MAX_WHOLE_TOKENS = 448, 1024  # with sentences, and with whole paragraphs
# Without the answer's paragraph, and without its whole article. What the reader refuses is decided
# by a threshold, later: these teach it to tell an answer from a sentence that is only near.
WITHOUT_ANSWER_SHARE, OFF_TOPIC_SHARE = 0.20, 0.05
WHOLE_SHARE, WHOLE_TOKENS = 0.08, (300, 900)  # of prompts with whole paragraphs, and their room
# In a shuffled prompt, an answer that is not among the nearest sentences takes the place of one in
# this share of the cases; otherwise such a question is not asked.
ADDED_SHARE = 0.5
NUMBERED_LATER_SHARE = 0.3  # of prompts whose first marker is any, so that all are learned
Group = tuple[int, list[int]]  # a paragraph and the rows of its sentences


@dataclass(slots=True)
class Example:
    """A prompt with its answer.

    Attributes:
        token_ids: Prompt, answer and end token.
        question_start: Index of the token before the question's second copy, after the passages.
        answer_start: Index of the last token of the prompt, whose successor is the answer's first.
        sentence_ends: Index of each sentence's closing marker; that of the refusal is last.
        gold: Index in ``sentence_ends`` of the right one.
        matches: By index of a sentence's token, whether the question has its word.
        question: The question.
        nearest: The sentences; their similarity is 0 if they were not compared.
    """

    token_ids: list[int]
    question_start: int
    answer_start: int
    sentence_ends: list[int]
    gold: int
    matches: dict[int, bool]
    question: Question
    nearest: list[Nearest]


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
        encoded = encode([f" {text}" for text in texts])
        self._sentences = [one.ids for one in encoded]
        self._stems = [stems(one.tokens) for one in encoded]
        titles = sorted({corpus.paragraphs[i].title for i in folder.paragraphs})
        shown = encode([f" {shorten_title(title)}" if title else "" for title in titles])
        self._titles = dict(zip(titles, (one.ids for one in shown), strict=True))
        asked = encode([f" {question.text}" for question in folder.questions])
        self._questions = [one.ids for one in asked]
        self._asked = [set(stems(one.tokens)) - {""} for one in asked]
        self._refusal = tokenizer.backend_tokenizer.encode(f" {REFUSAL}").ids

    def draw(
        self, number: int, rng: random.Random, shuffled_share: float, short_share: float = 0.0
    ) -> Example | None:
        """Return an example as in training, or None if the sentence is not found or too long.

        Args:
            number: That of the question in the folder.
            rng: Draws what is chosen at random.
            shuffled_share: Of prompts in random order.
            short_share: Of prompts with two sentences, one of which answers.
        """
        if rng.random() < short_share:
            return self.make(number, rng, 2, shuffled=True, added=True)
        chance = rng.random()
        without = NOTHING
        if chance < WITHOUT_ANSWER_SHARE + OFF_TOPIC_SHARE:
            without = ARTICLE if chance < OFF_TOPIC_SHARE else ANSWER
        count = NUM_SENTENCES if rng.random() < FULL_SHARE else rng.randint(2, NUM_SENTENCES)
        whole_tokens = rng.choice(WHOLE_TOKENS) if rng.random() < WHOLE_SHARE else 0
        shuffled = rng.random() < shuffled_share
        return self.make(
            number, rng, count, without=without, whole_tokens=whole_tokens, shuffled=shuffled,
            added=shuffled and rng.random() < ADDED_SHARE, reserved=True,
            first=rng.randrange(len(self._markers)) if rng.random() < NUMBERED_LATER_SHARE else 0,
        )  # fmt: skip

    def make(
        self,
        number: int,
        rng: random.Random,
        count: int = NUM_SENTENCES,
        *,
        without: str = NOTHING,
        whole_tokens: int = 0,
        added: bool = False,
        reserved: bool = False,
        shuffled: bool = False,
        first: int = 0,
    ) -> Example | None:
        """Return an example with the nearest sentences, or None if none can be made.

        Args:
            number: That of the question in the folder.
            rng: Draws the other paragraphs of the folder.
            count: The number of sentences.
            without: What the folder does not hold, see ``Folder.nearest``.
            whole_tokens: If more than 0, whole paragraphs are given, as many as have room in so
                many tokens.
            added: Whether the answer takes the last place if it is not among the nearest; with
                whole paragraphs, only if ``reserved``.
            reserved: Whether, of whole paragraphs, the answer's has room before nearer ones.
            shuffled: Whether the order is random, not that of their similarities.
            first: Index of the first marker.
        """
        folder = self.folder
        nearest = folder.nearest(number, rng, without=without)
        gold = None if without != NOTHING else folder.gold_row(folder.questions[number])
        if whole_tokens:
            answer = None
            if reserved and gold is not None:
                answer = folder.paragraph_of(gold)
            groups = self._whole(nearest, whole_tokens, answer, added=added)
            if shuffled:
                rng.shuffle(groups)
        else:
            kept = [one.row for one in nearest[:count]]
            if gold is not None and gold not in kept and added:
                kept[-1] = gold
            if shuffled:
                rng.shuffle(kept)
            groups = [(folder.paragraph_of(row), [row]) for row in kept]
        rows = [row for _, group in groups for row in group]
        if not rows or (gold is not None and gold not in rows):
            return None
        made = self._written(number, groups, gold, first)
        known = {one.row: one for one in nearest}
        made.nearest = [known.get(row, Nearest(row, 0.0)) for row in rows]
        limit = MAX_WHOLE_TOKENS if whole_tokens else MAX_TOKENS
        return made if len(made.token_ids) <= limit else None

    def _whole(
        self, nearest: Sequence[Nearest], room: int, answer: int | None, *, added: bool
    ) -> list[Group]:
        """Return whole paragraphs, that of the nearest sentence first, as many as have room.

        Room is given to paragraph ``answer`` first. Otherwise nearer paragraphs leave it none in
        some small prompts; such a question is not asked, but every refusal is.
        """
        folder = self.folder
        near = list(dict.fromkeys(folder.paragraph_of(one.row) for one in nearest))
        if added and answer is not None and answer not in near:
            near.append(answer)
        kept: dict[int, list[int]] = {}
        count = 0
        for paragraph in sorted(near, key=lambda one: one != answer):
            first = folder.first_row[paragraph]
            rows = list(range(first, first + len(folder.corpus.paragraphs[paragraph].sentences)))
            size = sum(len(self._sentences[row]) + 3 for row in rows)
            if size <= room and count + len(rows) <= len(self._markers):
                kept[paragraph] = rows
                room -= size
                count += len(rows)
        return [(paragraph, kept[paragraph]) for paragraph in near if paragraph in kept]

    def _written(
        self, number: int, groups: Sequence[Group], gold: int | None, first: int
    ) -> Example:
        """Return the prompt of the reader's chat template, and its answer."""
        ids = [self.id_of[BOS], self.id_of[QUESTION], *self._questions[number]]
        asked = self._asked[number]
        ends: list[int] = []
        answer: list[int] = []
        matches: dict[int, bool] = {}
        right = -1
        for place, (paragraph, rows) in enumerate(groups):
            title = self.folder.corpus.paragraphs[paragraph].title
            ids += [self.id_of[PASSAGE], *self._titles[title]]
            for row in rows:
                marker = self._markers[(first + len(ends)) % len(self._markers)]
                citation = self._citations[min(place, len(self._citations) - 1)]
                written = [marker, *self._sentences[row], citation, marker]
                if row == gold:
                    answer, right = written, len(ends)
                here = enumerate(self._stems[row], start=len(ids) + 1)
                matches |= {at: stem in asked for at, stem in here}
                ids += written
                ends.append(len(ids) - 1)
        none = [self.id_of[NONE], *self._refusal, self.id_of[NONE]]
        ids += none
        ends.append(len(ids) - 1)
        if gold is None:
            answer, right = none, len(ends) - 1
        asked_at = len(ids)
        ids += [self.id_of[QUESTION], *self._questions[number], self.id_of[ANSWER_TOKEN]]
        start = len(ids) - 1
        ids += [*answer, self.id_of[EOS]]
        question = self.folder.questions[number]
        return Example(ids, asked_at, start, ends, right, matches, question, [])


def stems(pieces: Sequence[str]) -> list[str]:
    """Return for each token of a text the stem of its word; "" for a frequent word."""
    found: list[str] = []
    starts = [i for i, piece in enumerate(pieces) if i == 0 or piece.startswith("Ġ")]
    for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True):
        found += [_stem("".join(pieces[start:end]).removeprefix("Ġ"))] * (end - start)
    return found


@cache
def _stem(word: str) -> str:
    return max(content_words(word), key=len, default="")
