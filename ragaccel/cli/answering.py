"""Answering: one question after the other, shown as the answer comes and written down."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.cli import report
from ragaccel.cli.flow import Flow
from ragaccel.cli.history import ANSWERED, FAILED, INTERRUPTED
from ragaccel.cli.marking import MarkedAnswer
from ragaccel.cli.terminal import printable
from ragaccel.cli.waiting import wait_for_rehearsal
from ragaccel.highlighting import Highlighter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragaccel.answer import Answer, Stream
    from ragaccel.cli.conversation import Conversation
    from ragaccel.cli.searching import Search
    from ragaccel.cli.terminal import Terminal
    from ragaccel.rag import RAG

_MOST_PAIRS = 3  # that --compare times, as long as they take no more than
_PATIENCE = 4.0  # seconds


@dataclass(frozen=True, slots=True)
class Manner:
    """How answers are made and shown."""

    json: bool = False
    stream: bool = True
    plain: bool = False
    show_sources: bool = False
    show_stats: bool = False
    compare: bool = False
    accelerate: bool = True


class Answering:
    """Asks a RAG and shows what comes back; ``seconds`` holds what led up to the answer."""

    def __init__(
        self,
        terminal: Terminal,
        rag: RAG,
        search: Search,
        conversation: Conversation,
        *,
        manner: Manner,
        generation: dict[str, Any],
    ) -> None:
        self._terminal = terminal
        self._rag = rag
        self._search = search
        self._conversation = conversation
        self._manner = manner
        self._generation = generation if manner.accelerate else generation | {"drafter": _plain()}
        if manner.compare:  # an answer that was given before would be known
            self._generation |= {"remember": False}
        self._partial = ""
        self.seconds: dict[str, float] = {}
        self.model = ""

    def ask(self, question: str) -> Answer:
        """Answer one question, show it, and write it down whole or as far as it came."""
        history = self._conversation.messages()
        self._conversation.begin(question, self.model)
        self._partial, self._search.seconds = "", 0.0
        try:
            if self._manner.compare:  # the first request of a process pays for all that is lazy
                wait_for_rehearsal(self._terminal)
                self._rag.ask(question, history=history, **self._generation | _WARM_UP)
                self._search.seconds = 0.0
            self._terminal.set_apart()
            answer = self._shown(question, history)
            self.seconds["retrieve"] = self._search.seconds
            comparison = self._compared(question, history, answer)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | BrokenPipeError)
            self._conversation.end(self._partial, INTERRUPTED if interrupted else FAILED)
            raise
        details = report.answer_document(question, answer, self.seconds, comparison)
        self._conversation.end(answer.text, ANSWERED, _without_texts(details))
        self._report(answer, comparison, details)
        return answer

    def _shown(self, question: str, history: list[dict[str, str]]) -> Answer:
        if self._manner.json or not self._manner.stream:
            with self._terminal.working("reading the passages"):
                answer = self._rag.ask(question, history=history, **self._generation)
            self._partial = answer.text
            if not self._manner.json:
                self._show_whole(answer)
            return answer
        with self._rag.stream(question, history=history, **self._generation) as stream:
            self._show_stream(stream)
            return stream.answer

    def _show_whole(self, answer: Answer) -> None:
        if self._manner.plain:
            self._terminal.write(printable(answer.text), end="\n")
            return
        marked = MarkedAnswer(self._terminal)
        marked.add(answer.segments())
        marked.finish()

    def _show_stream(self, stream: Stream) -> None:
        pieces = self._pieces(stream)
        if self._manner.plain:
            flow = Flow(self._terminal.write, self._terminal.wrap_width)
            for piece in pieces:
                flow.feed(printable(piece))
            flow.finish()
            self._terminal.write("\n")
            return
        highlighter, marked = Highlighter(stream.passages), MarkedAnswer(self._terminal)
        try:
            for piece in pieces:
                marked.add(highlighter.feed(piece))
        finally:  # an answer that is broken off is shown as far as it came
            marked.add(highlighter.finish())
            marked.finish()

    def _pieces(self, stream: Stream) -> Iterator[str]:
        """The pieces of a stream, kept as they come; a spinner turns until the first."""
        with self._terminal.working("reading the passages"):
            piece = next(stream, None)
        while piece is not None:
            self._partial += piece
            yield piece
            piece = next(stream, None)

    def _compared(
        self, question: str, history: list[dict[str, str]], answer: Answer
    ) -> report.Comparison | None:
        if not self._manner.compare:
            return None
        plainly = self._generation | {"drafter": _plain()}
        began = time.perf_counter()
        with self._terminal.working("comparing with plain decoding"):
            pairs = [(answer, self._rag.ask(question, history=history, **plainly))]
            while len(pairs) < _MOST_PAIRS and time.perf_counter() - began < _PATIENCE:
                ours = self._rag.ask(question, history=history, **self._generation)
                pairs.append((ours, self._rag.ask(question, history=history, **plainly)))
        return report.Comparison.of(pairs)

    def _report(
        self, answer: Answer, comparison: report.Comparison | None, document: dict[str, Any]
    ) -> None:
        terminal, manner = self._terminal, self._manner
        if manner.json:
            document["conversation"] = self._conversation.number
            document["model"] = self.model
            terminal.json(document)
        elif not manner.plain or manner.show_sources:
            if not answer.answered:
                report.show_nearest(terminal, answer)
            report.show_sources(terminal, answer, everything=manner.show_sources)
        if not answer.answered:
            terminal.note(report.refusal_line(answer))
        if manner.show_stats:
            terminal.note("")
            terminal.note(report.stats_table(answer, self.seconds))
        if answer.finish_reason == "length" and answer.answered:
            terminal.note("the answer was cut at --max-tokens", style="yellow")
        if answer.dropped_passages:
            dropped = len(answer.dropped_passages)
            terminal.note(f"{dropped} of the passages found did not fit into the prompt")
        if not manner.json:
            terminal.note("")
        terminal.note(report.speed_line(answer, comparison))


_WARM_UP = {"max_new_tokens": 1}


def _plain() -> object:
    from ragaccel.decoding.session import NoDrafter

    return NoDrafter()


def _without_texts(document: dict[str, Any]) -> dict[str, Any]:
    """What the history keeps beside question and answer: the passages' places, not their texts."""
    kept = {k: v for k, v in document.items() if k not in ("question", "answer", "dropped_sources")}
    kept["sources"] = [{k: v for k, v in s.items() if k != "text"} for s in document["sources"]]
    return kept
