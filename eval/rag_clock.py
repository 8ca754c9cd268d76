"""Timing a question: when its passages, its first word and its last one were there."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel import Embedder, Passage, Retriever


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer and what it took, in seconds from the question on.

    ``stages`` sum to ``total_seconds``. ``embed`` is the question's vector, ``search`` the rest of
    finding passages, ``prompt`` all between the passages and the request: the text, its tokens,
    the references in it. ``prefill`` is the prompt's passes, ``draft`` the guesses and ``verify``
    the passes after the prompt. ``rest`` is what remains: the framework before the search,
    words out of tokens, streaming, remembering.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    passes: int
    first_token_seconds: float
    total_seconds: float
    stages: dict[str, float]


class TimedEmbedder:
    """An embedder, and what embedding its last question took."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder, self.seconds = embedder, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def embed_query(self, text: str) -> Any:
        """Embed a text to find by, timed."""
        started = perf_counter()
        vector = self._embedder.embed_query(text)
        self.seconds = perf_counter() - started
        return vector


class TimedSource:
    """A retriever as chains take one, and when its last search ended, and what that took.

    Args:
        retriever: over the index.
        embedder: its embedder.
    """

    def __init__(self, retriever: Retriever, embedder: TimedEmbedder) -> None:
        self._retriever, self._embedder = retriever, embedder
        self.ended = 0.0
        self.stages: dict[str, float] = {}

    def search(self, query: str, k: int = 10) -> list[Passage]:
        """Find the k best passages, timed."""
        started = perf_counter()
        found = self._retriever.search(query, k)
        self.ended = perf_counter()
        embed = self._embedder.seconds
        self.stages = {"embed": embed, "search": self.ended - started - embed}
        return found


@dataclass(slots=True)
class Clock:
    """The time from a question to its first and its last word; also a streamer of ``generate``."""

    began: float = field(default_factory=perf_counter)
    first: float = 0.0
    ended: float = 0.0
    _has_prompt: bool = False

    def read(self, pieces: Iterator[str]) -> str:
        """Read a stream to its end; the first piece of text that is not empty counts."""
        text = ""
        for piece in pieces:
            if piece and not text:
                self.first = perf_counter()
            text += piece
        return text

    def put(self, _ids: Any) -> None:
        """Take what ``generate`` hands to its streamer: the prompt, then token after token.

        Its first token counts, though it may be half a word.
        """
        if self._has_prompt and not self.first:
            self.first = perf_counter()
        self._has_prompt = True

    def end(self) -> None:
        """Take note of nothing: ``generate`` has work left."""

    def stop(self) -> None:
        """The answer is whole; one without a word had its first one now."""
        self.ended = perf_counter()
        self.first = self.first or self.ended

    def asked(
        self,
        text: str,
        token_ids: Sequence[int],
        prompt_tokens: int,
        passes: int,
        known: dict[str, float],
    ) -> Asked:
        """Put together what was asked, the seconds that no known stage took as the rest."""
        total = self.ended - self.began
        return Asked(
            text=text,
            token_ids=tuple(token_ids),
            prompt_tokens=prompt_tokens,
            passes=passes,
            first_token_seconds=self.first - self.began,
            total_seconds=total,
            stages={**known, "rest": total - sum(known.values())},
        )
