"""Passage compression: cut retrieved passages to the sentences nearest to the question.

This module imports neither numpy nor SQLite, unlike the rest of retrieval: ``import ragaccel.rag``
and the command line import it at start-up.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError
from ragaccel.passage import NearestSentence, is_heading, sentence_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.passage import Passage
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.retriever import Retriever

    Scored = list[tuple[int, int, float]]


_WORD_WEIGHT = 0.2  # of shared words beside the cosine, to choose a passage's best sentence
_STEM = 5  # characters of a word that count


def nearest_sentences(
    embedder: Embedder, query: str, passages: Sequence[Passage]
) -> list[NearestSentence]:
    """Find the sentence of each passage that is nearest to the question, nearest first.

    Headings are ignored unless a passage has nothing else. A blank passage has no sentence.
    """
    found = []
    for passage, scored in zip(passages, score_sentences(embedder, query, passages), strict=True):
        if scored:
            start, end, score = max(scored, key=lambda one: one[2])
            found.append(NearestSentence(passage, start, end, score))
    return sorted(found, key=lambda one: -one.score)


def best_sentences(
    embedder: Embedder, query: str, passages: Sequence[Passage], scores: Sequence[Scored] = ()
) -> list[NearestSentence]:
    """Find the sentence of each passage that answers the question best, in the passages' order.

    Beside the cosine the words count that it shares with the question: embedders of one language
    mistake sentences of others. ``scores`` are those of ``score_sentences``, if known.
    """
    asked = _stems(query)
    found = []
    for passage, scored in zip(
        passages, scores or score_sentences(embedder, query, passages), strict=True
    ):
        if scored:
            start, end, score = max(
                scored,
                key=lambda one: (
                    one[2]
                    + _WORD_WEIGHT
                    * len(asked & _stems(passage.text[one[0] : one[1]]))
                    / max(1, len(asked))
                ),
            )
            found.append(NearestSentence(passage, start, end, score))
    return found


def _stems(text: str) -> set[str]:
    return {word[:_STEM] for word in re.findall(r"\w{3,}", text.casefold())}


def score_sentences(embedder: Embedder, query: str, passages: Sequence[Passage]) -> list[Scored]:
    """Score the sentences of each passage, as (start, end, mean cosine with the question).

    The mean is of two cosines: of the sentence alone, and of the passage's title with the sentence.
    A heading scores -1 if the passage has other sentences: it is near to many questions but answers
    none.
    """
    spans = [list(sentence_spans(passage.text)) for passage in passages]
    texts, titled = [], []
    for passage, passage_spans in zip(passages, spans, strict=True):
        for start, end in passage_spans:
            texts.append(passage.text[start:end])
            titled.append(f"{passage.title}\n{texts[-1]}")
    if not texts:
        return [[] for _ in passages]
    similarities = embedder.embed_documents([*texts, *titled]) @ embedder.embed_query(query)
    means = iter(((similarities[: len(texts)] + similarities[len(texts) :]) / 2).tolist())
    scored = []
    for passage, passage_spans in zip(passages, spans, strict=True):
        is_answer = [not is_heading(passage.text, *span) for span in passage_spans]
        passage_scores = [next(means) for _ in passage_spans]
        scored.append(
            [
                (start, end, score if counts or not any(is_answer) else -1.0)
                for (start, end), score, counts in zip(
                    passage_spans, passage_scores, is_answer, strict=True
                )
            ]
        )
    return scored


class CompressingRetriever:
    """A retriever that cuts the passages of another to the sentences nearest to the question.

    A small reader model answers better from few sentences than from whole passages. Each passage
    keeps the best run of ``sentences`` consecutive sentences around its best one (see
    ``score_sentences``), and passages are ordered by their best sentence, whose score becomes
    ``score``. ``start``, ``end``, ``page`` and ``line`` still locate the text in its document.

    Args:
        retriever: Finds the whole passages.
        sentences: The number of sentences that each passage keeps.
        margin: Drop passages whose score is lower than the best score by more than this; None keeps
            all.

    Raises:
        ConfigurationError: ``sentences`` is below 1, or ``margin`` is below 0.
    """

    def __init__(
        self, retriever: Retriever, *, sentences: int = 2, margin: float | None = None
    ) -> None:
        if sentences < 1:
            raise ConfigurationError(f"sentences is {sentences}: keep one or more per passage")
        if margin is not None and not margin >= 0:
            raise ConfigurationError(f"margin is {margin}: choose 0 or more, or None")
        self.retriever, self.sentences, self.margin = retriever, sentences, margin
        self._last: tuple[str, Sequence[Passage], Sequence[Scored]] | None = None

    def search(self, query: str, k: int = 6) -> list[Passage]:
        """Find at most k passages for a question, cut to their nearest sentences, best first.

        Raises:
            EmptyIndexError: The index holds no passage.
        """
        passages = self.retriever.search(query, k)
        scores = score_sentences(self.retriever.embedder, query, passages)
        self._last = query, passages, scores
        compressed = [
            self._cut(passage, scored) if scored else passage
            for passage, scored in zip(passages, scores, strict=True)
        ]
        compressed.sort(key=lambda passage: -passage.score)
        if self.margin is None or not compressed:
            return compressed
        lowest = compressed[0].score - self.margin
        return [passage for passage in compressed if passage.score >= lowest]

    def warm_up(self) -> None:
        """Load the vectors and the embedder now instead of at the first question."""
        self.retriever.warm_up()

    def nearest(self, query: str, k: int = 3) -> list[NearestSentence]:
        """Find the k best whole passages for a question, each with its best sentence.

        If the last search was for the same question, its passages are used.
        """
        last, self._last = self._last, None
        if last is None or last[0] != query or len(last[1]) < k:
            found = self.retriever.search(query, k)
            return best_sentences(self.embedder, query, found)
        return best_sentences(self.embedder, query, last[1][:k], last[2][:k])

    @property
    def embedder(self) -> Embedder:
        """The embedder of the retriever."""
        return self.retriever.embedder

    def _cut(self, passage: Passage, scored: Scored) -> Passage:
        """Cut a passage to the best-scoring run of sentences that includes the best sentence."""
        scores = [score for _, _, score in scored]
        best = scores.index(max(scores))
        count = min(self.sentences, len(scored))
        starts = range(max(0, best - count + 1), min(best, len(scored) - count) + 1)
        first = max(starts, key=lambda i: sum(scores[i : i + count]))
        start, end = scored[first][0], scored[first + count - 1][1]
        return replace(passage.cut(start, end), score=scores[best])
