"""Passage compression: cut retrieved passages to the sentences nearest to the question.

This module imports neither numpy nor SQLite, unlike the rest of retrieval: ``import ragaccel.rag``
and the command line import it at start-up.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError
from ragaccel.passage import NearestSentence, Passage, is_statement, sentence_spans
from ragaccel.retrieval.language import WordMatch, is_english, is_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.retriever import Retriever

    Scored = list[tuple[int, int, float]]


_WORD_WEIGHT = 0.4  # of the question's words beside the cosine, to choose the best sentence
_PASSAGE_WEIGHT = 0.6  # of the passage's score beside its sentence, to order passages
_FOREIGN_WEIGHT = 0.5  # of the cosine if the embedder does not know the question's language
_NO_STATEMENT = -100.0  # the score of a heading or question beside statements
_NUM_POOLED = 12  # passages of which the best sentences are compared


def nearest_sentences(
    embedder: Embedder, query: str, passages: Sequence[Passage]
) -> list[NearestSentence]:
    """Find the sentence of each passage that is nearest to the question, nearest first.

    Headings and questions are ignored unless a passage has nothing else. A blank passage has no
    sentence.
    """
    found = []
    for passage, scored in zip(passages, score_sentences(embedder, query, passages), strict=True):
        if scored:
            start, end, score = max(scored, key=lambda one: one[2])
            found.append(NearestSentence(passage, start, end, score))
    return sorted(found, key=lambda one: -one.score)


def best_sentences(
    embedder: Embedder, query: str, passages: Sequence[Passage]
) -> list[NearestSentence]:
    """Find the sentence of each passage that answers the question best, in the passages' order.

    Beside the cosine the words count that it shares with the question: embedders of one language
    mistake sentences of others.
    """
    value = _judge_of(embedder, query)
    found = []
    for passage, scored in zip(passages, score_sentences(embedder, query, passages), strict=True):
        sentences = [NearestSentence(passage, *one) for one in scored]
        found += sorted(sentences, key=value)[-1:]
    return found


def _judge_of(embedder: Embedder, query: str) -> Callable[[NearestSentence], float]:
    """Return a function that says how well a sentence answers a question."""
    match = WordMatch(query)
    foreign = not getattr(embedder, "is_multilingual", True) and not is_english(query)
    weight = _FOREIGN_WEIGHT if foreign else 1.0

    def value(one: NearestSentence) -> float:
        share = match.share(one.text, f"{one.passage.path} {one.passage.title}")
        return weight * one.score + _WORD_WEIGHT * share

    return value


def score_sentences(embedder: Embedder, query: str, passages: Sequence[Passage]) -> list[Scored]:
    """Score the sentences of each passage, as (start, end, cosine with the question).

    A sentence is embedded below its passage's title, which tells what it is about. A heading scores
    -100 if the passage has other sentences: it is near to many questions but answers none.
    """
    spans = [list(sentence_spans(passage.text)) for passage in passages]
    texts = [
        f"{passage.title}\n{passage.text[start:end]}"
        for passage, passage_spans in zip(passages, spans, strict=True)
        for start, end in passage_spans
    ]
    if not texts:
        return [[] for _ in passages]
    similarities = embedder.embed_documents(texts) @ embedder.embed_query(query)
    scores = iter(similarities.tolist())
    return [
        _statements_first(passage, passage_spans, [next(scores) for _ in passage_spans])
        for passage, passage_spans in zip(passages, spans, strict=True)
    ]


def rank_sentences(
    query: str, passages: Sequence[Passage], embedder: Embedder | None = None
) -> list[Scored]:
    """Rank the sentences of each passage, as (start, end, relevance); see ``SentenceRanker``.

    It is [] if the ranker's model is not on this machine, or does not know the question's language
    as well as the embedder. Headings and questions are scored as in ``score_sentences``.

    Args:
        query: A question.
        passages: The passages.
        embedder: What the sentences would be compared by else.
    """
    from ragaccel.retrieval.embedder import local_default_folder

    embeds_better = is_foreign(query) or getattr(embedder, "is_multilingual", True)
    if embedder is not None and embeds_better and not is_english(query):
        return []
    if local_default_folder() is None:  # before torch is imported
        return []
    from ragaccel.retrieval.sentence_ranker import default_ranker

    ranker = default_ranker()
    if ranker is None:
        return []
    relevance = ranker.relevance(query, passages)
    return [
        _statements_first(passage, list(sentence_spans(passage.text)), values)
        for passage, values in zip(passages, relevance, strict=True)
    ]


def _statements_first(
    passage: Passage, spans: list[tuple[int, int]], scores: Sequence[float]
) -> Scored:
    """Return (start, end, score) of each sentence; others score lowest beside statements."""
    is_answer = [is_statement(passage.text, *span) for span in spans]
    return [
        (start, end, score if counts or not any(is_answer) else _NO_STATEMENT)
        for (start, end), score, counts in zip(spans, scores, is_answer, strict=True)
    ]


def _chance(log_odds: float) -> float:
    return 1 / (1 + math.exp(min(-log_odds, 700.0)))


def likeliest_sentences(
    query: str, passages: Sequence[Passage], embedder: Embedder | None = None
) -> list[NearestSentence]:
    """Find the sentence of each passage that the sentence ranker puts first, likeliest first.

    It is [] where ``rank_sentences`` is. ``score`` is the chance.
    """
    found = []
    for passage, ranked in zip(passages, rank_sentences(query, passages, embedder), strict=False):
        for start, end, relevance in sorted(ranked, key=lambda one: one[2])[-1:]:
            found.append(NearestSentence(passage, start, end, _chance(relevance)))
    return sorted(found, key=lambda one: -one.score)


def _readable(passages: Sequence[Passage]) -> Sequence[Passage]:
    """Return the passages in Latin script, or all if there are none."""
    return [one for one in passages if not is_foreign(one.text)] or passages


class CompressingRetriever:
    """A retriever that keeps the sentences nearest to the question from the passages of another.

    A small reader model answers better from few sentences than from whole passages. Each sentence
    is a passage of its own, likeliest first: by the chance that the sentence ranker gives it, which
    becomes ``score``; or, where ``rank_sentences`` returns none, by cosine, which does then, and by
    the words that it shares with the question. ``start``, ``end``, ``page`` and ``line`` still
    locate the text in its document.

    Args:
        retriever: Finds the whole passages.
        sentences: The number of sentences to keep; the bundled reader chooses from five.

    Raises:
        ConfigurationError: ``sentences`` is below 1.
    """

    def __init__(self, retriever: Retriever, *, sentences: int = 5) -> None:
        if sentences < 1:
            raise ConfigurationError(f"sentences is {sentences}: keep one or more")
        self.retriever, self.sentences = retriever, sentences

    def search(self, query: str, k: int = 6) -> list[Passage]:
        """Find k passages for a question; return their nearest sentences, best first, each once.

        Raises:
            EmptyIndexError: The index holds no passage.
        """
        passages: Sequence[Passage] = self.retriever.search(query, k)
        readable = _readable(passages)
        ranked = rank_sentences(query, readable, self.embedder)
        if ranked or is_english(query):
            passages = readable
        scores = ranked or score_sentences(self.embedder, query, passages)
        every = [
            replace(passage.cut(start, end), score=score)
            for passage, scored in zip(passages, scores, strict=True)
            for start, end, score in scored
            if score > _NO_STATEMENT
        ]
        if ranked:
            every = [replace(one, score=_chance(one.score)) for one in every]
            every.sort(key=lambda one: -one.score)
        else:
            value = _judge_of(self.embedder, query)
            every.sort(key=lambda one: -value(NearestSentence(one, 0, len(one.text), one.score)))
        different: dict[str, Passage] = {}  # passages may overlap
        for sentence in every:
            different.setdefault(" ".join(sentence.text.split()), sentence)
        return [*different.values()][: self.sentences]

    def document_passages(self, path: str) -> list[Passage]:
        """Return the whole passages of a document; [] if the other retriever cannot."""
        find = getattr(self.retriever, "document_passages", None)
        return [] if find is None else find(path)

    def warm_up(self) -> None:
        """Load the vectors and the models now instead of at the first question."""
        self.retriever.warm_up()
        rank_sentences("Warm?", [Passage("warm-up", "It is warm.")])

    def nearest(self, query: str, k: int = 6) -> list[NearestSentence]:
        """Find the k best whole passages for a question, each with its best sentence.

        Both are those of the ranker, unless ``rank_sentences`` returns none.
        """
        found = self.retriever.search(query, max(k, _NUM_POOLED))
        likeliest = likeliest_sentences(query, _readable(found), self.embedder)
        if likeliest:
            return likeliest[:k]
        best = best_sentences(self.embedder, query, found)
        value, highest = _judge_of(self.embedder, query), max((p.score for p in found), default=0)
        order = sorted(
            best,
            key=lambda one: (
                -value(one) - _PASSAGE_WEIGHT * one.passage.score / (highest if highest > 0 else 1)
            ),
        )
        return order[:k]

    @property
    def embedder(self) -> Embedder:
        """The embedder of the retriever."""
        return self.retriever.embedder
