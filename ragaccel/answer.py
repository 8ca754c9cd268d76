"""Answer and Stream: what comes back from a question, whole or piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.citing import CopiedSpan, cited_numbers, copied_spans
from ragaccel.decoding.request import Cancellation, Cancelled
from ragaccel.forking import claim_torch
from ragaccel.highlighting import Highlighter, Segment, segments
from ragaccel.reporting import citations, facts

if TYPE_CHECKING:
    from types import TracebackType

    from ragaccel.decoding.stats import GenerationResult, Stats
    from ragaccel.passage import NearestSentence, Passage

__all__ = ["Answer", "CopiedSpan", "Highlighter", "Segment", "Stream", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written; the token that ends the answer counts as written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: its text, where that was copied from, and what it took.

    ``text`` ends before the stop string, if one ended it; ``token_ids`` are all tokens that were
    generated, the ending one included. ``finish_reason`` is ``"stop"`` (an end token, a stop
    string or a stopping criterion) or ``"length"`` (``max_new_tokens``). ``passages[n - 1]`` is
    the passage that the prompt numbers ``[n]``; ``dropped_passages`` did not fit.

    ``refusal`` is empty where the question is answered. ``RAG`` sets it, and ``nearest``, the
    sentences found that are nearest to the question, where it is not: ``"not told"`` (the model
    says that the passages do not tell), and of the bundled reader ``"not near"``, ``"foreign
    script"`` and ``"no quote"`` (see ``ragaccel.quotes``). What that reader wrote is not passed on
    then: ``text`` says that the passages do not tell, whatever ``token_ids`` were generated.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    stats: Stats
    passages: tuple[Passage, ...] = ()
    copied_spans: tuple[CopiedSpan, ...] = ()
    dropped_passages: tuple[Passage, ...] = ()
    refusal: str = ""
    nearest: tuple[NearestSentence, ...] = ()

    @classmethod
    def of(
        cls,
        text: str,
        result: GenerationResult,
        passages: Sequence[Passage] = (),
        dropped_passages: Sequence[Passage] = (),
    ) -> Answer:
        """Put together an answer from its text and the generation it came from."""
        stats = result.stats
        usage = Usage(
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=len(result.token_ids),
            total_tokens=stats.prompt_tokens + len(result.token_ids),
        )
        return cls(
            text=text,
            token_ids=tuple(result.token_ids),
            finish_reason=result.finish_reason,
            usage=usage,
            stats=stats,
            passages=tuple(passages),
            copied_spans=copied_spans(text, passages),
            dropped_passages=tuple(dropped_passages),
        )

    def __str__(self) -> str:
        return self.text

    @property
    def answered(self) -> bool:
        """Whether the text answers the question, as far as ``RAG`` can tell."""
        return not self.refusal

    @property
    def cited_numbers(self) -> tuple[int, ...]:
        """The passage numbers that the text names, ``[2]``, in the order of first mention."""
        return tuple(cited_numbers(self.text, len(self.passages), self.copied_spans))

    @property
    def cited_passages(self) -> tuple[Passage, ...]:
        """The passages that the text names, in the order of first mention."""
        return tuple(self.passages[number - 1] for number in self.cited_numbers)

    def segments(self) -> list[Segment]:
        """The text in pieces for display, each copied from one passage or from none."""
        return segments(self.text, self.copied_spans)

    def report(
        self, text: str | None = None, *, place: Callable[[Passage], str] | None = None
    ) -> dict[str, Any]:
        """Tell how it was made and where its words stand, as plain values ready for JSON.

        ``citations`` are those of ``ragaccel.citations``; ``passages`` are what they are from, in
        the order of the answer, with their ``passage_id``, ``citation`` and what is known of
        ``title``, ``source``, ``page`` and ``line``. A citation's ``passage`` is a place in those,
        from 0: two passages may have one id.

        Args:
            text: what is left of the text, where some was taken out; citations are places in it.
            place: writes a citation, in place of ``Passage.citation``.
        """
        is_whole = text is None or text == self.text
        said = self.text if text is None else text
        spans = self.copied_spans if is_whole else copied_spans(said, self.passages)
        numbers = list(dict.fromkeys(span.passage_number for span in spans))
        told = citations(said, self.passages, spans, place=place)
        for span, citation in zip(spans, told, strict=True):
            citation["passage"] = numbers.index(span.passage_number)
        return {
            "draft_tokens": self.stats.draft_tokens,
            "accepted_tokens": self.stats.accepted_tokens,
            "forward_passes": self.stats.verify_passes,
            "acceptance_length": self.stats.acceptance_length,
            "seconds": self.stats.total_seconds,
            "citations": told,
            "passages": [facts(self.passages[number - 1], place=place) for number in numbers],
            "dropped_passages": [passage.passage_id for passage in self.dropped_passages],
        }


class Stream(Iterator[str]):
    """An answer being generated: iterate it for pieces of text, then ask for ``answer``.

    Nothing computes between two pieces: the thread that iterates does the work, so leaving
    (``close()``, the end of a ``with`` block, or dropping the stream) is all it takes to stop, and
    an error during generation reaches whoever iterates. The pieces joined are ``answer.text``.
    A stream may be closed from any thread; one that computes meanwhile stops after the round of
    passes that it is in.

    Args:
        pieces: computes; raises ``Cancelled`` once that was asked for.
        passages: those that the answer is made from.
        cancellation: asked for by ``close``; whoever computes the pieces looks at it.
        written: the tokens so far; grows while the pieces are computed.
    """

    def __init__(
        self,
        pieces: Generator[str, None, Answer],
        passages: Sequence[Passage] = (),
        cancellation: Cancellation | None = None,
        written: Sequence[int] = (),
    ) -> None:
        self.passages = tuple(passages)
        self._written = written
        self.cancellation = Cancellation() if cancellation is None else cancellation
        self._pieces = pieces
        self._answer: Answer | None = None
        self._busy = threading.Lock()
        self._has_ended = False

    def __next__(self) -> str:
        claim_torch()
        with self._busy:
            piece = None if self.closed else self._next()
        if self.cancellation.is_asked:  # by another thread too, which may have found it busy
            self._free()
            piece = None
        if piece is None:
            raise StopIteration
        return piece

    def _next(self) -> str | None:
        """The next piece; None at the end."""
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._has_ended, self._answer = True, end.value
        except Cancelled:
            self._has_ended = True
        except BaseException:
            self._has_ended = True
            raise
        return None

    def _free(self) -> None:
        """Free what the request holds; if a thread computes, it will do so itself."""
        if self._busy.acquire(blocking=False):
            try:
                self._pieces.close()
            finally:
                self._busy.release()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens generated so far: those that are no text too, and those held back."""
        return tuple(self._written)

    @property
    def answer(self) -> Answer:
        """The finished answer; raises RuntimeError before the stream has been read to its end."""
        if self._answer is None:
            if self.closed:
                raise Cancelled("the stream was closed before its end: there is no answer")
            raise RuntimeError("the answer is there when the stream has been read to its end")
        return self._answer

    @property
    def closed(self) -> bool:
        """Whether the stream has ended or been closed: no further piece will come."""
        return self._has_ended or self.cancellation.is_asked

    def close(self) -> None:
        """Stop generating and free what the request held; safe to call twice, from any thread."""
        self.cancellation.ask()
        self._free()

    def finish(self) -> Answer:
        """Read the stream to its end and return the answer."""
        for _ in self:
            pass
        return self.answer

    def through(self, pieces: Generator[str, None, Answer]) -> Stream:
        """Return a stream of other pieces, made from this one's, over the same request."""
        return Stream(pieces, self.passages, self.cancellation, self._written)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
