"""Focusing: retrieved passages cut to the sentences nearest to the question, for small readers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError
from ragaccel.sentences import is_heading, sentence_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.passage import Passage
    from ragaccel.retrieve.retriever import Retriever


class FocusedRetriever:
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
            NothingIndexedError: The index holds no passage.
        """
        passages = self.retriever.search(query, k)
        spans = [list(sentence_spans(passage.text)) for passage in passages]
        scores = self._scores(query, passages, spans)
        focused = []
        for passage, places in zip(passages, spans, strict=True):
            own, scores = scores[: len(places)], scores[len(places) :]
            focused.append(self._cut(passage, places, own) if places else passage)
        focused.sort(key=lambda passage: -passage.score)
        if self.margin is None or not focused:
            return focused
        least = focused[0].score - self.margin
        return [passage for passage in focused if passage.score >= least]

    def warm_up(self) -> None:
        """Load the vectors and the embedder now, not at the first question."""
        self.retriever.warm_up()

    def _scores(
        self, query: str, passages: Sequence[Passage], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[float]:
        """The mean of each sentence's nearness to the question, without and with its title."""
        texts, titled = [], []
        for passage, places in zip(passages, spans, strict=True):
            for start, end in places:
                texts.append(passage.text[start:end])
                titled.append(f"{passage.title}\n{texts[-1]}")
        if not texts:
            return []
        embedder = self.retriever.embedder
        near = embedder.embed_documents([*texts, *titled]) @ embedder.embed_query(query)
        scores: list[float] = ((near[: len(texts)] + near[len(texts) :]) / 2).tolist()
        return scores

    def _cut(
        self, passage: Passage, places: Sequence[tuple[int, int]], scores: Sequence[float]
    ) -> Passage:
        """The run of sentences around the best one whose scores add up to most."""
        tells = [not is_heading(passage.text, *place) for place in places]
        scores = [
            s if told or not any(tells) else -1.0 for s, told in zip(scores, tells, strict=True)
        ]
        best = scores.index(max(scores))
        count = min(self.sentences, len(places))
        starts = range(max(0, best - count + 1), min(best, len(places) - count) + 1)
        first = max(starts, key=lambda i: sum(scores[i : i + count]))
        start, end = places[first][0], places[first + count - 1][1]
        return replace(passage.cut(start, end), score=scores[best])
