"""Focusing: the sentences of retrieved passages that are nearest to the question."""

from __future__ import annotations

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


_NUM_SEARCHED = 6  # passages that the nearest sentences are looked for in


def nearest_sentences(
    embedder: Embedder, query: str, passages: Sequence[Passage]
) -> list[NearestSentence]:
    """Find the nearest sentence of each passage, the nearest of all first; headings do not count.

    A heading counts where a passage holds nothing else; a passage without a word has no sentence.
    """
    found = []
    for passage, scored in zip(passages, score_sentences(embedder, query, passages), strict=True):
        if scored:
            start, end, score = max(scored, key=lambda one: one[2])
            found.append(NearestSentence(passage, start, end, score))
    return sorted(found, key=lambda one: -one.score)


def score_sentences(embedder: Embedder, query: str, passages: Sequence[Passage]) -> list[Scored]:
    """Score the sentences of each passage, as (start, end, nearness to the question).

    A heading is near to many questions and answers none: it scores -1 beside other sentences.
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
    """Searches like a retriever, then cuts each passage to its nearest sentences.

    A small reader chooses better among few sentences than among all of a passage. Each sentence is
    embedded, alone and after the passage's title, and compared with the question; a passage keeps
    the run of ``sentences`` sentences with the best one in it (a heading is near to many questions
    and answers none, so it is not taken for the best), and passages are ordered by their
    best one (``score``: its mean cosine). What is kept is a piece of the document still: ``start``,
    ``end``, ``page`` and ``line`` move along.

    Args:
        retriever: What finds whole passages.
        sentences: How many sentences a passage keeps.
        margin: Passages whose score is lower than the best one's by more than this are left out;
            None keeps all.

    Raises:
        ConfigurationError: Fewer than one sentence, or a margin below 0.
    """

    def __init__(
        self, retriever: Retriever, *, sentences: int = 2, margin: float | None = None
    ) -> None:
        if sentences < 1:
            raise ConfigurationError(f"sentences is {sentences}: a passage keeps one or more")
        if margin is not None and not margin >= 0:
            raise ConfigurationError(f"margin is {margin}: it must be 0 or more")
        self.retriever, self.sentences, self.margin = retriever, sentences, margin

    def search(self, query: str, k: int = 6) -> list[Passage]:
        """Find the at most k passages that bear most on a question, cut to what bears most on it.

        Raises:
            EmptyIndexError: The index holds no passage.
        """
        passages = self.retriever.search(query, k)
        scores = score_sentences(self.retriever.embedder, query, passages)
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
        """Load the vectors and the embedder now, not at the first question."""
        self.retriever.warm_up()

    def nearest(self, query: str, k: int = 3) -> list[NearestSentence]:
        """Find the k whole passages with the sentences nearest to a question."""
        found = self.retriever.search(query, max(k, _NUM_SEARCHED))
        return nearest_sentences(self.embedder, query, found)[:k]

    @property
    def embedder(self) -> Embedder:
        """The embedding model that compares."""
        return self.retriever.embedder

    def _cut(self, passage: Passage, scored: Scored) -> Passage:
        """The run of sentences around the best one whose scores add up to most."""
        scores = [score for _, _, score in scored]
        best = scores.index(max(scores))
        count = min(self.sentences, len(scored))
        starts = range(max(0, best - count + 1), min(best, len(scored) - count) + 1)
        first = max(starts, key=lambda i: sum(scores[i : i + count]))
        start, end = scored[first][0], scored[first + count - 1][1]
        return replace(passage.cut(start, end), score=scores[best])
