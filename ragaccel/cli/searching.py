"""Searching: the retriever of a question, with the text that was piped in put first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ragaccel.errors import NothingIndexedError
from ragaccel.retrieval.focusing import nearest_sentences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.passage import NearestSentence, Passage
    from ragaccel.rag import PassageSource
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.retriever import Retriever

_SEARCHED = 6  # passages that the nearest sentences are looked for in


class Search:
    """A retriever that takes its time with a stopwatch and never comes back empty-handed.

    ``first`` are passages that go before those found; ``seconds`` adds up what searches took.

    Args:
        retriever: What finds the passages of an answer.
        name: What it searches.
        whole: What finds whole passages, where the nearest sentences are wanted.
    """

    def __init__(self, retriever: PassageSource, name: str, whole: Retriever) -> None:
        self._retriever = retriever
        self._name = name
        self._whole = whole
        self.first: Sequence[Passage] = ()
        self.seconds = 0.0

    def search(self, query: str, k: int = 6) -> list[Passage]:
        """The piped-in passages, then the nearest ones of the index, k in all.

        Raises:
            NothingIndexedError: there is none.
        """
        began = time.perf_counter()
        passages = [*self.first, *self._retriever.search(query, k)][:k]
        self.seconds += time.perf_counter() - began
        if not passages:
            raise NothingIndexedError(f"no passage of {self._name} has to do with the question")
        return passages

    @property
    def embedder(self) -> Embedder:
        """The embedding model of the index."""
        return self._whole.embedder

    def nearest(self, query: str, k: int = 3) -> list[NearestSentence]:
        """Find the k passages with the sentences nearest to a question, piped-in ones too."""
        found = [*self.first, *self._whole.search(query, max(k, _SEARCHED))]
        return nearest_sentences(self.embedder, query, found)[:k]


def passages_of(text: str, question: str, embedder: Embedder, limit: int) -> list[Passage]:
    """Cut a piped-in text into passages and keep those nearest to the question, in their order."""
    from ragaccel.passage import Document
    from ragaccel.retrieval.chunking import split_document

    document = Document(path="<stdin>", text=text)
    passages = split_document(document, embedder.count_tokens, embedder.max_tokens)
    if len(passages) <= limit:
        return passages
    nearness = embedder.embed_documents([p.text for p in passages]) @ embedder.embed_query(question)
    nearest = sorted(range(len(passages)), key=lambda i: -float(nearness[i]))[:limit]
    return [passages[i] for i in sorted(nearest)]
