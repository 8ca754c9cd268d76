"""Answers: their text, copied spans, citations, highlighting and statistics; answer streams."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ragaccel.decoding.request import Cancellation, Cancelled
from ragaccel.paths import claim_torch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable
    from types import TracebackType

    from ragaccel.decoding.stats import GenerationResult, Stats
    from ragaccel.passage import NearestSentence, Passage


MIN_TOKENS = 5
MIN_CHARACTERS = 24

# Scripts written without spaces: every character is a token of its own.
UNSPACED_SCRIPTS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
SYMBOLS = (
    r"!-/:-@\[-\^`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u060c\u061b\u061f\u0964\u0965"
    r"\u2010-\u2bff\u3001-\u3030\ufe10-\ufe1f\ufe30-\ufe6f\uff01-\uff0f\uff1a-\uff20"
)
_WORD = rf"[^\s{UNSPACED_SCRIPTS}{SYMBOLS}]+"
# Contractions, compounds, names of files and numbers are one token: "don't", "a.txt", "1,000".
TOKEN_PATTERN = re.compile(
    rf"\s+|[{UNSPACED_SCRIPTS}]|{_WORD}(?:(?:['’.\-]|(?<=\d),(?=\d)){_WORD})*|[{SYMBOLS}]"
)
_SEPARATOR_CODE, _UNKNOWN_CODE, _FIRST_TOKEN_CODE = "\0", "\1", 2

_CITATION = re.compile(r"(?<!\w)\[(\d{1,3}(?:\s*(?:[,;]|-|–)\s*\d{1,3})*)\]")
_NUMBER_OR_RANGE = re.compile(r"(\d+)(?:\s*[-–]\s*(\d+))?")
_NEXT_CITATION = re.compile(r"[\s.,;:!?…\"'”’)»]*(\[\d[\d\s,;–-]*\])")
_CITATION_PREFIX = re.compile(r"[\s.,;:!?…\"'”’)»]*(\[(\d[\d\s,;–-]*)?)?")


@dataclass(frozen=True, slots=True)
class CopiedSpan:
    """A run of the answer that also occurs, character for character, in a passage.

    ``answer.text[start:end] == passage.text[passage_start:passage_end]``, exactly, in characters.
    ``passage_number`` is the passage's number in the prompt, counted from 1.
    """

    start: int
    end: int
    passage_id: str
    passage_number: int
    passage_start: int
    passage_end: int


def copied_spans(text: str, passages: Sequence[Passage]) -> tuple[CopiedSpan, ...]:
    """Return the longest runs of text that an answer shares with its passages, in order.

    A run has at least 5 tokens (words and punctuation marks) or 24 characters, begins and ends at
    word boundaries in the answer and in the passage, and is not part of a longer run. Two runs may
    overlap if the passages do. The result depends on the texts alone, not on the drafter. If
    several passages contain a run, its span names the one cited right after it, else the passage
    of the previous run, else the best ranked one.
    """
    finder = SpanFinder(passages)
    runs: list[tuple[int, int]] = []
    for found in TOKEN_PATTERN.finditer(text):
        runs += finder.push(found.group())
    runs += finder.finish()
    spans: list[CopiedSpan] = []
    for first, last in runs:
        start, end = finder.starts[first], finder.starts[last]
        wanted = leading_citation(text[end:]) + ([spans[-1].passage_number] if spans else [])
        number, offset = finder.find_source((first, last), wanted)
        passage_id = passages[number - 1].passage_id
        spans.append(CopiedSpan(start, end, passage_id, number, offset, offset + end - start))
    return tuple(spans)


def cited_numbers(text: str, num_passages: int, spans: Sequence[CopiedSpan] = ()) -> list[int]:
    """Return the passage numbers that an answer cites: ``[2]``, ``[1, 3]``, ``[1-3]``; each once.

    Ignore numbers without a passage, and brackets inside a copied span: they belong to its passage.
    """
    numbers: dict[int, None] = {}
    for found in _CITATION.finditer(text):
        if not any(span.start <= found.start() and found.end() <= span.end for span in spans):
            numbers.update(dict.fromkeys(_numbers_in(found.group(1))))
    return [number for number in numbers if 1 <= number <= num_passages]


def leading_citation(text: str) -> list[int]:
    """Return the passage numbers of the citation at a text's start, after any punctuation."""
    cited = _NEXT_CITATION.match(text)
    return _numbers_in(cited.group(1)) if cited else []


def may_become_citation(text: str) -> bool:
    """Return whether a text could begin with a citation once more text is appended.

    Return False if it already begins with a complete one.
    """
    return _CITATION_PREFIX.fullmatch(text) is not None


class SpanFinder:
    """The longest run of tokens that ends at an answer's newest token and occurs in a passage.

    The passages have each token encoded as one character, so that ``str`` methods find runs.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._code_of: dict[str, str] = {}
        self._tokens = [TOKEN_PATTERN.findall(passage.text) for passage in passages]
        self._passages = [self._encoded(tokens) for tokens in self._tokens]
        self._joined = _SEPARATOR_CODE.join(self._passages)
        self._codes: list[str] = []
        self._is_space: list[bool] = []
        self.starts = [0]  # offset of every token, and the end of the last
        self._weights = [0]  # before each token, the number of tokens that are not white space
        self._words = [0]  # before each token, the number of tokens with a letter or digit
        self._first = 0
        self._last_end = 0

    def _encoded(self, tokens: Sequence[str]) -> str:
        code_of = self._code_of
        for token in tokens:
            if token not in code_of:
                code_of[token] = chr(len(code_of) + _FIRST_TOKEN_CODE)
        return "".join([code_of[token] for token in tokens])

    def matching_passages(self, run: tuple[int, int]) -> list[int]:
        """Return the numbers of the passages that contain a run of the answer's tokens."""
        codes = self._run_codes(*run)
        return [n for n, passage in enumerate(self._passages, start=1) if codes in passage]

    def find_source(self, run: tuple[int, int], wanted: Sequence[int]) -> tuple[int, int]:
        """Return the number of a passage that contains a run, and the run's offset in it.

        Prefer the passages ``wanted``, in their order, then the best ranked one.
        """
        matching = self.matching_passages(run)
        number = next((n for n in wanted if n in matching), matching[0])
        token = self._passages[number - 1].index(self._run_codes(*run))
        return number, sum(map(len, self._tokens[number - 1][:token]))

    @property
    def run(self) -> tuple[int, int]:
        """Return the run as token indices [first, end), without white space at its ends."""
        end = len(self._codes)
        return self._first, end - (end > self._first and self._is_space[-1])

    @property
    def is_long_enough(self) -> bool:
        """Return whether the run is long enough to be a copied span."""
        first, last = self.run
        return self._words[last] > self._words[first] and (
            self._weights[last] - self._weights[first] >= MIN_TOKENS
            or self.starts[last] - self.starts[first] >= MIN_CHARACTERS
        )

    def push(self, token: str) -> list[tuple[int, int]]:
        """Append a token; return [(first, end)] of the copied run that it ends, or []."""
        before, first = self.run, self._first
        was_long_enough = self.is_long_enough
        self._append(token)
        self._shrink()
        if self._first == first or not was_long_enough or before[1] <= self._last_end:
            return []
        self._last_end = before[1]
        return [before]

    def finish(self) -> list[tuple[int, int]]:
        """Return [(first, end)] of the copied run at the end of the answer, or []."""
        return [self.run] if self.is_long_enough and self.run[1] > self._last_end else []

    def _run_codes(self, first: int, last: int) -> str:
        return "".join(self._codes[first:last])

    def _append(self, token: str) -> None:
        space = token.isspace()
        self._codes.append(self._code_of.get(token, _UNKNOWN_CODE))
        self._is_space.append(space)
        self.starts.append(self.starts[-1] + len(token))
        self._weights.append(self._weights[-1] + (not space))
        self._words.append(self._words[-1] + any(map(str.isalnum, token)))

    def _shrink(self) -> None:
        """Drop as few tokens at the front as needed for the rest to occur in a passage."""
        end = len(self._codes)
        if self._codes[-1] == _UNKNOWN_CODE:
            self._first = end
        elif self._run_codes(self._first, end) not in self._joined:
            candidates = range(self._first + 1, end + 1)
            self._first = candidates[bisect_left(candidates, x=True, key=self._is_copied_from)]
        while self._first < end and self._is_space[self._first]:
            self._first += 1

    def _is_copied_from(self, first: int) -> bool:
        return self._run_codes(first, len(self._codes)) in self._joined


def _numbers_in(citation: str) -> list[int]:
    numbers: list[int] = []
    for first, last in _NUMBER_OR_RANGE.findall(citation):
        numbers += range(int(first), min(int(last or first), int(first) + 99) + 1)
    return numbers


_CONNECTORS = frozenset("'’.-,")
_ALWAYS_COMPLETE = re.compile(rf"[{UNSPACED_SCRIPTS}{SYMBOLS}]")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of an answer for display; ``passage_number`` is 0 if it was not copied."""

    text: str
    passage_number: int = 0


def segments(text: str, spans: Sequence[CopiedSpan]) -> list[Segment]:
    """Cut an answer into pieces for display; if spans overlap, show the earlier one whole."""
    pieces: list[Segment] = []
    at = 0
    for span in spans:
        start = max(at, span.start)
        if start < span.end:
            pieces += [
                Segment(text[at:start]),
                Segment(text[start : span.end], span.passage_number),
            ]
            at = span.end
    pieces.append(Segment(text[at:]))
    return [piece for piece in pieces if piece.text]


class Highlighter:
    """A highlighter of copied spans in a streamed answer: feed it text, show what it returns.

    All segments together are those of the finished answer. Words that may begin a copied span are
    returned once that is certain; words that several passages contain, once the text after them
    shows which passage is cited.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._finder = SpanFinder(passages)
        self._tokens: list[str] = []
        self._num_shown = 0
        self._pending = ""
        self._finished_runs: list[tuple[int, int]] = []  # runs whose passage is not known yet
        self._number = 0

    def feed(self, piece: str) -> list[Segment]:
        """Add the next piece of the answer; return the segments that are certain now."""
        self._pending += piece
        tokens = TOKEN_PATTERN.findall(self._pending)
        whole = _num_complete(tokens)
        self._pending = "".join(tokens[whole:])
        return self._show(tokens[:whole])

    def finish(self) -> list[Segment]:
        """Return the remaining segments; call it once, at the end of the answer."""
        rest = self._show(TOKEN_PATTERN.findall(self._pending))
        self._pending = ""
        self._finished_runs += self._finder.finish()
        return _merged(
            [*rest, *self._show_finished_runs(last=True), *self._show_until(len(self._tokens), 0)]
        )

    def _show(self, tokens: Iterable[str]) -> list[Segment]:
        shown: list[Segment] = []
        for token in tokens:
            self._tokens.append(token)
            self._finished_runs += self._finder.push(token)
            shown += self._show_finished_runs()
            if not self._finished_runs:
                shown += self._show_current_run()
        return _merged(shown)

    def _show_finished_runs(self, *, last: bool = False) -> list[Segment]:
        """Return the segments up to the first finished run whose passage is not certain yet.

        If ``last`` is true, no more text follows, so that every passage is certain.
        """
        shown: list[Segment] = []
        while self._finished_runs:
            first, end = self._finished_runs[0]
            behind = "".join(self._tokens[end:])
            if (
                not last
                and may_become_citation(behind)
                and len(self._finder.matching_passages((first, end))) > 1
            ):
                break
            self._number, _ = self._finder.find_source(
                (first, end), [*leading_citation(behind), self._number]
            )
            shown += [*self._show_until(first, 0), *self._show_until(end, self._number)]
            self._finished_runs.pop(0)
        return shown

    def _show_current_run(self) -> list[Segment]:
        """Return segments of the text before the current run, and of the run if it is certain.

        The run is certain if it is long enough and only one passage contains it.
        """
        first, end = self._finder.run
        shown = self._show_until(first, 0)
        if self._finder.is_long_enough:
            matching_passages = self._finder.matching_passages((first, end))
            if len(matching_passages) == 1:
                self._number = matching_passages[0]
                shown += self._show_until(end, self._number)
        return shown

    def _show_until(self, end: int, number: int) -> list[Segment]:
        text = "".join(self._tokens[self._num_shown : end])
        self._num_shown = max(self._num_shown, end)
        return [Segment(text, number)] if text else []


def _num_complete(tokens: Sequence[str]) -> int:
    """Return the number of leading tokens that appended text cannot change."""
    count = len(tokens)
    if count and tokens[-1] in _CONNECTORS and count > 1 and not _is_complete(tokens[-2]):
        return count - 2
    return count if count and _ALWAYS_COMPLETE.fullmatch(tokens[-1]) else max(0, count - 1)


def _is_complete(token: str) -> bool:
    return token.isspace() or _ALWAYS_COMPLETE.fullmatch(token) is not None


def _merged(pieces: Iterable[Segment]) -> list[Segment]:
    """Return the segments with adjacent ones of the same passage joined."""
    made: list[Segment] = []
    for piece in pieces:
        if made and made[-1].passage_number == piece.passage_number:
            made[-1] = Segment(made[-1].text + piece.text, piece.passage_number)
        else:
            made.append(piece)
    return made


def citations(
    text: str,
    passages: Sequence[Passage],
    spans: Sequence[CopiedSpan] | None = None,
    *,
    format_citation: Callable[[Passage], str] | None = None,
) -> list[dict[str, Any]]:
    """Return the copied spans of a text as dictionaries ready for JSON.

    Each has its ``text``, the ``passage_id``, the ``citation`` (file and page or line), and its
    character offsets in the passage (``start``, ``end``) and in the text (``out_start``,
    ``out_end``).

    Args:
        text: the text.
        passages: the passages that it may have been copied from.
        spans: the text's copied spans; computed by default.
        format_citation: returns the citation of a passage, in place of ``Passage.citation``.
    """
    found = copied_spans(text, passages) if spans is None else spans
    return [
        {
            "text": text[span.start : span.end],
            "passage_id": span.passage_id,
            "citation": _format_citation(
                passages[span.passage_number - 1].cut(span.passage_start, span.passage_end),
                format_citation,
            ),
            "start": span.passage_start,
            "end": span.passage_end,
            "out_start": span.start,
            "out_end": span.end,
        }
        for span in found
    ]


def passage_metadata(
    passage: Passage, *, format_citation: Callable[[Passage], str] | None = None
) -> dict[str, str | int]:
    """Return a passage's known metadata: id, citation, title, source, page and line."""
    known = {
        "passage_id": passage.passage_id,
        "citation": _format_citation(passage, format_citation),
        "title": passage.title,
        "source": passage.path,
        "page": passage.page,
        "line": passage.line,
    }
    return {name: value for name, value in known.items() if value is not None and value != ""}


def _format_citation(passage: Passage, format_citation: Callable[[Passage], str] | None) -> str:
    return passage.citation if format_citation is None else format_citation(passage)


__all__ = ["Answer", "CopiedSpan", "Highlighter", "Segment", "Stream", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens read and written; the token that ends the answer counts as written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: its text, the spans copied from passages, and statistics.

    ``text`` excludes the stop string, if one ended the answer; ``token_ids`` are all generated
    tokens, including an end token. ``finish_reason`` is ``"stop"`` (an end token, a stop
    string or a stopping criterion) or ``"length"`` (``max_new_tokens``). ``passages[n - 1]`` is
    the passage that the prompt numbers ``[n]``; ``dropped_passages`` did not fit in the prompt.

    ``refusal`` is empty if the question is answered. Otherwise ``RAG`` sets it to ``"not found"``
    or ``"not told"`` (the model says that the passages hold no answer) or, for the bundled reader,
    also to ``"not English"``, ``"no quote"`` or ``"not sure"`` (see ``ragaccel.quotes``). The
    bundled reader's own text is not shown then: ``text`` is "The passages do not tell.", whatever
    ``token_ids`` were generated. ``nearest`` holds the passages nearest to
    the question with their nearest sentence, if it is refused or the bundled reader answers.

    ``chance`` is how likely a quote of the bundled reader is the answer, by what was right on
    people's questions; None if it was not judged, and for all other models.
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
    chance: float | None = None

    @classmethod
    def of(
        cls,
        text: str,
        result: GenerationResult,
        passages: Sequence[Passage] = (),
        dropped_passages: Sequence[Passage] = (),
    ) -> Answer:
        """Return an answer with the given text, from the result of a generation."""
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
        """Return whether the text answers the question, as far as ``RAG`` can tell."""
        return not self.refusal

    @property
    def cited_numbers(self) -> tuple[int, ...]:
        """Return the passage numbers that the text cites (``[2]``), in order of first mention."""
        return tuple(cited_numbers(self.text, len(self.passages), self.copied_spans))

    @property
    def source_numbers(self) -> tuple[int, ...]:
        """Return the passage numbers that the text cites, then those it copies from, each once."""
        copied = [span.passage_number for span in self.copied_spans]
        return tuple(dict.fromkeys([*self.cited_numbers, *copied]))

    @property
    def sources(self) -> tuple[Passage, ...]:
        """Return the passages of ``source_numbers``: those that the text cites or copies from."""
        return tuple(self.passages[number - 1] for number in self.source_numbers)

    def segments(self) -> list[Segment]:
        """Return the text in pieces for display, each copied from one passage or not copied."""
        return segments(self.text, self.copied_spans)

    def report(
        self, text: str | None = None, *, format_citation: Callable[[Passage], str] | None = None
    ) -> dict[str, Any]:
        """Return statistics, citations and passages as a dictionary ready for JSON.

        ``citations`` are those of ``ragaccel.citations``. ``passages`` are those that the answer
        copies from, in the order of the answer, with their ``passage_id``, ``citation`` and, if
        known, ``title``, ``source``, ``page`` and ``line``. A citation's ``passage`` is an index
        into those, since two passages may have one id.

        Args:
            text: the answer's text if parts of it were removed; the offsets of citations refer to
                it. By default the answer's own text.
            format_citation: returns the citation of a passage, in place of ``Passage.citation``.
        """
        is_whole = text is None or text == self.text
        said = self.text if text is None else text
        spans = self.copied_spans if is_whole else copied_spans(said, self.passages)
        numbers = list(dict.fromkeys(span.passage_number for span in spans))
        listed = citations(said, self.passages, spans, format_citation=format_citation)
        for span, citation in zip(spans, listed, strict=True):
            citation["passage"] = numbers.index(span.passage_number)
        return {
            "draft_tokens": self.stats.draft_tokens,
            "accepted_tokens": self.stats.accepted_tokens,
            "forward_passes": self.stats.verify_passes,
            "acceptance_length": self.stats.acceptance_length,
            "seconds": self.stats.total_seconds,
            "citations": listed,
            "passages": [
                passage_metadata(self.passages[number - 1], format_citation=format_citation)
                for number in numbers
            ],
            "dropped_passages": [passage.passage_id for passage in self.dropped_passages],
        }


class Stream(Iterator[str]):
    """An answer being generated: iterate it for pieces of text, then read ``answer``.

    The thread that iterates does the work, and nothing is computed between two pieces. To stop,
    call ``close()``, leave a ``with`` block or drop the stream. An error during generation is
    raised to the thread that iterates. The pieces joined are ``answer.text``. Any thread may close
    a stream; a thread that is computing then stops after its current step.

    Args:
        pieces: computes the pieces, then returns the answer; raises ``Cancelled`` if cancelled.
        passages: the passages that the answer is made from.
        cancellation: set by ``close`` and read by ``pieces``.
        token_ids: the list to which ``pieces`` appends the generated tokens.
    """

    def __init__(
        self,
        pieces: Generator[str, None, Answer],
        passages: Sequence[Passage] = (),
        cancellation: Cancellation | None = None,
        token_ids: Sequence[int] = (),
    ) -> None:
        self.passages = tuple(passages)
        self._token_ids = token_ids
        self.cancellation = Cancellation() if cancellation is None else cancellation
        self._pieces = pieces
        self._answer: Answer | None = None
        self._busy = threading.Lock()
        self._is_finished = False

    def __next__(self) -> str:
        claim_torch()
        with self._busy:
            piece = None if self.closed else self._next()
        if self.cancellation.is_cancelled:  # another thread may have closed it during the step
            self._release()
            piece = None
        if piece is None:
            raise StopIteration
        return piece

    def _next(self) -> str | None:
        """Return the next piece, or None at the end."""
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._is_finished, self._answer = True, end.value
        except Cancelled:
            self._is_finished = True
        except BaseException:
            self._is_finished = True
            raise
        return None

    def _release(self) -> None:
        """Free the request's resources; if another thread is computing, that thread does it."""
        if self._busy.acquire(blocking=False):
            try:
                self._pieces.close()
            finally:
                self._busy.release()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens generated so far, with special ones and those not yet yielded."""
        return tuple(self._token_ids)

    @property
    def answer(self) -> Answer:
        """Return the finished answer; raise RuntimeError if the stream was not read to its end."""
        if self._answer is None:
            if self.closed:
                raise Cancelled("the stream was closed before its end: it has no answer")
            raise RuntimeError("the stream has no answer before it is read to its end")
        return self._answer

    @property
    def closed(self) -> bool:
        """Return whether the stream has ended or been closed: no further piece will come."""
        return self._is_finished or self.cancellation.is_cancelled

    def close(self) -> None:
        """Stop generating and free the resources; safe to call twice, and from any thread."""
        self.cancellation.cancel()
        self._release()

    def finish(self) -> Answer:
        """Read the stream to its end and return the answer."""
        for _ in self:
            pass
        return self.answer

    def through(
        self, change: Callable[[Generator[str, None, Answer]], Generator[str, None, Answer]]
    ) -> Stream:
        """Let ``change`` compute other pieces and another answer from this stream's."""
        self._pieces = change(self._pieces)
        return self

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_MAX_THREADS = 64  # calls in progress at one time; further ones queue
_THREAD_NAME = "ragaccel-async"


_EXECUTOR = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=_THREAD_NAME)

Result = TypeVar("Result")


async def run_in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work in a thread, without blocking the event loop.

    Raises:
        ConfigurationError: this process was forked from one that had used a model.
        RuntimeError: ``work`` raised SystemExit or KeyboardInterrupt, which would end the event
            loop and everybody's requests. In these threads signals do not raise them; only a
            callback of the request can.
    """
    claim_torch()
    from asyncio import get_running_loop  # importing it takes 0.03 s

    return await get_running_loop().run_in_executor(_EXECUTOR, _contain_exits, work)


def _contain_exits(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"a callback of this request raised {error!r}") from error


async def run_cancellable(work: Callable[[Cancellation], Result]) -> Result:
    """Run blocking work in a thread; cancel the work if the awaiting task is cancelled."""
    cancellation = Cancellation()
    try:
        return await run_in_thread(partial(work, cancellation))
    finally:
        cancellation.cancel()


async def await_answer(stream: Stream) -> Answer:
    """Read a stream to its end in a thread; close it if the awaiting task is cancelled."""
    try:
        return await run_in_thread(stream.finish)
    finally:
        stream.close()


class AsyncStream(AsyncIterator[str]):
    """An answer being generated, for asyncio: iterate it for pieces, then read ``answer``.

    Generation stops when the loop over it is left, when the awaiting task is cancelled, or when
    ``aclose`` is called.

    Args:
        stream: the stream, or a function that opens it when the first piece is awaited.
    """

    def __init__(self, stream: Stream | Callable[[], Stream]) -> None:
        self._stream = stream
        self._pieces = self._aiter_pieces()

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def _opened(self) -> Stream:
        """Return the stream, opened in a thread at the first call if it is given as a function."""
        if not isinstance(self._stream, Stream):
            self._stream = await run_in_thread(self._stream)
        return self._stream

    async def _aiter_pieces(self) -> AsyncGenerator[str, None]:
        """Yield the pieces without blocking the event loop; close the stream when left."""
        stream = await self._opened()
        try:
            while (piece := await run_in_thread(lambda: next(stream, None))) is not None:
                yield piece
        finally:
            with suppress(RuntimeError):  # the event loop may be closed when this is dropped
                stream.close()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens generated so far, with special ones and those not yet yielded."""
        return self._stream.token_ids if isinstance(self._stream, Stream) else ()

    @property
    def answer(self) -> Answer:
        """Return the finished answer; raise RuntimeError if the stream was not read to its end."""
        if not isinstance(self._stream, Stream):
            raise RuntimeError("the stream has no answer before it is read to its end")
        return self._stream.answer

    async def aclose(self) -> None:
        """Stop generating and free the resources; safe to call twice."""
        await self._pieces.aclose()
        if isinstance(self._stream, Stream):
            self._stream.close()

    async def finish(self) -> Answer:
        """Read the stream to its end and return the answer."""
        return await await_answer(await self._opened())
