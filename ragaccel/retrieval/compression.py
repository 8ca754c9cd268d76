"""Passage compression: cut retrieved passages to the sentences nearest to the question.

This module imports neither numpy nor SQLite, unlike the rest of retrieval: ``import ragaccel.rag``
and the command line import it at start-up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError
from ragaccel.passage import NearestSentence, is_heading, sentence_spans
from ragaccel.retrieval.language import WordMatch, is_english, share_of_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.passage import Passage
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.retriever import Retriever

    Scored = list[tuple[int, int, float]]


_WORD_WEIGHT = 0.4  # of the question's words beside the cosine, to choose the best sentence
_PASSAGE_WEIGHT = 0.6  # of the passage's score beside its sentence, to order passages
_FOREIGN_WEIGHT = 0.5  # of the cosine if the embedder does not know the question's language
SHARED_WORD_WEIGHT = 0.6
"""Of the share of the question's words that a sentence has, beside its cosine, where the reader's
sentences are chosen.

Of 1,000 held-out questions the first sentence by cosine alone answers 52 %, by both 60 % (``python
-m eval reader``, before and with it).
"""
_HEADING = -1.0  # the score of a heading beside sentences
_NUM_POOLED = 12  # passages of which the best sentences are compared


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
    value = _judge_of(embedder, query)
    found = []
    for passage, scored in zip(
        passages, scores or score_sentences(embedder, query, passages), strict=True
    ):
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
    -1 if the passage has other sentences: it is near to many questions but answers none.
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
    scored = []
    for passage, passage_spans in zip(passages, spans, strict=True):
        is_answer = [not is_heading(passage.text, *span) for span in passage_spans]
        passage_scores = [next(scores) for _ in passage_spans]
        scored.append(
            [
                (start, end, score if counts or not any(is_answer) else _HEADING)
                for (start, end), score, counts in zip(
                    passage_spans, passage_scores, is_answer, strict=True
                )
            ]
        )
    return scored


def with_shared_words(cosine: float, query: str, title: str, sentence: str) -> float:
    """Return what a sentence is chosen by for the reader: its cosine and the words it shares."""
    return cosine + SHARED_WORD_WEIGHT * share_of_words(query, f"{title}\n{sentence}")


def _place(passage: Passage) -> tuple[str, str, int, str]:
    return passage.path, passage.passage_id, passage.start, passage.text


class CompressingRetriever:
    """A retriever that cuts the passages of another to the sentences nearest to the question.

    A small reader model answers better from few sentences than from whole passages. By default each
    passage keeps the best run of ``sentences`` consecutive sentences around its best one (see
    ``score_sentences``), and passages are ordered by their best sentence, whose score becomes
    ``score``. ``start``, ``end``, ``page`` and ``line`` still locate the text in its document.

    Args:
        retriever: Finds the whole passages.
        sentences: The number of sentences that each passage keeps.
        apart: Keep the ``sentences`` nearest ones of all passages instead, each as a passage of its
            own, nearest first, by cosine and by the words that they share with the question;
            ``score`` is the cosine alone. The bundled reader chooses from five of them.

    Raises:
        ConfigurationError: ``sentences`` is below 1.
    """

    def __init__(self, retriever: Retriever, *, sentences: int = 2, apart: bool = False) -> None:
        if sentences < 1:
            raise ConfigurationError(f"sentences is {sentences}: keep one or more")
        self.retriever, self.sentences, self.apart = retriever, sentences, apart
        self._last: tuple[str, Sequence[Passage], Sequence[Scored]] | None = None

    def search(self, query: str, k: int = 6) -> list[Passage]:
        """Find k passages for a question and return their nearest sentences, best first.

        Raises:
            EmptyIndexError: The index holds no passage.
        """
        passages = self.retriever.search(query, k)
        scores = score_sentences(self.retriever.embedder, query, passages)
        self._last = query, passages, scores
        if self.apart:
            return self._nearest_apart(query, passages, scores)
        compressed = [
            self._cut(passage, scored) if scored else passage
            for passage, scored in zip(passages, scores, strict=True)
        ]
        return sorted(compressed, key=lambda passage: -passage.score)

    def _nearest_apart(
        self, query: str, passages: Sequence[Passage], scores: Sequence[Scored]
    ) -> list[Passage]:
        every = [
            replace(passage.cut(start, end), score=score)
            for passage, scored in zip(passages, scores, strict=True)
            for start, end, score in scored
            if score > _HEADING
        ]
        every.sort(key=lambda one: -with_shared_words(one.score, query, one.title, one.text))
        nearest: dict[str, Passage] = {}  # passages may overlap
        for sentence in every:
            nearest.setdefault(" ".join(sentence.text.split()), sentence)
        return [*nearest.values()][: self.sentences]

    def warm_up(self) -> None:
        """Load the vectors and the embedder now instead of at the first question."""
        self.retriever.warm_up()

    def nearest(self, query: str, k: int = 6) -> list[NearestSentence]:
        """Find the k best whole passages for a question, each with its best sentence.

        What the last search has read is used again if it was for the same question.
        """
        found = self.retriever.search(query, max(k, _NUM_POOLED))
        last, self._last = self._last, None
        known = {}
        if last is not None and last[0] == query:
            known = {_place(p): scored for p, scored in zip(*last[1:], strict=True)}
        new = [passage for passage in found if _place(passage) not in known]
        scores = zip(new, score_sentences(self.embedder, query, new), strict=True)
        known |= {_place(passage): scored for passage, scored in scores}
        best = best_sentences(self.embedder, query, found, [known[_place(p)] for p in found])
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

    def _cut(self, passage: Passage, scored: Scored) -> Passage:
        """Cut a passage to the best-scoring run of sentences that includes the best sentence."""
        scores = [score for _, _, score in scored]
        best = scores.index(max(scores))
        count = min(self.sentences, len(scored))
        starts = range(max(0, best - count + 1), min(best, len(scored) - count) + 1)
        first = max(starts, key=lambda i: sum(scores[i : i + count]))
        start, end = scored[first][0], scored[first + count - 1][1]
        return replace(passage.cut(start, end), score=scores[best])
