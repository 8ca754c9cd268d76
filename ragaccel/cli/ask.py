"""Asking questions: read the question, open index and model, answer, compare, keep the history."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.answer import Highlighter
from ragaccel.cli import answer_view
from ragaccel.cli.history import ANSWERED, FAILED, INTERRUPTED, History, HistoryError
from ragaccel.cli.index import Source, open_index, read_stdin, resolve_source
from ragaccel.cli.terminal import MarkedAnswer, UsageError, WordWrap, printable
from ragaccel.drafting.policy import JIT_WARMUP
from ragaccel.errors import EmptyIndexError
from ragaccel.retrieval.compression import nearest_sentences

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ragaccel.answer import Answer, Stream
    from ragaccel.cli.index import OpenIndex
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal
    from ragaccel.decoding.session import Drafter
    from ragaccel.llm import LLM
    from ragaccel.passage import NearestSentence, Passage
    from ragaccel.rag import RAG, PassageSource
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.retriever import Retriever


_JIT_WARMUP_SECONDS = 60.0


def wait_for_jit_warmup(terminal: Terminal) -> None:
    """Wait until compiled functions are ready: about ten seconds the first time on a machine."""
    with terminal.working("compiling (only the first time on this machine)"):
        JIT_WARMUP.wait(_JIT_WARMUP_SECONDS)


# --compare times at most this many pairs of answers, and no further pair after this many seconds
_MAX_PAIRS = 3
_MAX_COMPARE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The options for decoding and showing answers; ``plain`` shows no marks of copied spans."""

    json: bool = False
    stream: bool = True
    plain: bool = False
    show_sources: bool = False
    show_stats: bool = False
    compare: bool = False
    accelerate: bool = True


class Answerer:
    """A RAG whose answers are shown and written to the history.

    ``seconds`` maps the stages before the answer, e.g. ``"index"``, to their seconds.
    """

    def __init__(
        self,
        terminal: Terminal,
        rag: RAG,
        search: TimedRetriever,
        conversation: Conversation,
        *,
        output: OutputOptions,
        generation: dict[str, Any],
    ) -> None:
        self._terminal = terminal
        self._rag = rag
        self._search = search
        self._conversation = conversation
        self._output = output
        self._generation = generation if output.accelerate else generation | {"drafter": _plain()}
        if output.compare:  # else the second answer would be drafted from the remembered first
            self._generation |= {"remember": False}
        self._partial = ""
        self.seconds: dict[str, float] = {}
        self.model = ""

    def ask(self, question: str) -> Answer:
        """Answer a question, show the answer and write it to the history, even if incomplete."""
        history = self._conversation.messages()
        self._conversation.begin(question, self.model)
        self._partial, self._search.seconds = "", 0.0
        try:
            if self._output.compare:  # the first request of a process also pays for lazy set-up
                wait_for_jit_warmup(self._terminal)
                self._rag.ask(question, history=history, **self._generation | _WARM_UP)
                self._search.seconds = 0.0
            self._terminal.separate()
            answer = self._show_answer(question, history)
            self.seconds["retrieve"] = self._search.seconds
            comparison = self._compare(question, history, answer)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | BrokenPipeError)
            self._conversation.end(self._partial, INTERRUPTED if interrupted else FAILED)
            raise
        details = answer_view.answer_json(question, answer, self.seconds, comparison)
        self._conversation.end(answer.text, ANSWERED, _without_texts(details))
        self._report(answer, comparison, details)
        return answer

    def _show_answer(self, question: str, history: list[dict[str, str]]) -> Answer:
        if self._output.json or not self._output.stream:
            with self._terminal.working("reading the passages"):
                answer = self._rag.ask(question, history=history, **self._generation)
            self._partial = answer.text
            if not self._output.json:
                self._show_whole(answer)
            return answer
        with self._rag.stream(question, history=history, **self._generation) as stream:
            self._show_stream(stream)
            return stream.answer

    def _show_whole(self, answer: Answer) -> None:
        if self._output.plain:
            self._terminal.write(printable(answer.text), end="\n")
            return
        marked = MarkedAnswer(self._terminal)
        marked.add(answer.segments())
        marked.finish()

    def _show_stream(self, stream: Stream) -> None:
        pieces = self._pieces(stream)
        if self._output.plain:
            wrap = WordWrap(self._terminal.write, self._terminal.wrap_width)
            for piece in pieces:
                wrap.feed(printable(piece))
            wrap.finish()
            self._terminal.write("\n")
            return
        highlighter, marked = Highlighter(stream.passages), MarkedAnswer(self._terminal)
        try:
            for piece in pieces:
                marked.add(highlighter.feed(piece))
        finally:  # show the pieces that came before an interruption, too
            marked.add(highlighter.finish())
            marked.finish()

    def _pieces(self, stream: Stream) -> Iterator[str]:
        """Yield and keep the pieces of a stream; show a spinner until the first."""
        with self._terminal.working("reading the passages"):
            piece = next(stream, None)
        while piece is not None:
            self._partial += piece
            yield piece
            piece = next(stream, None)

    def _compare(
        self, question: str, history: list[dict[str, str]], answer: Answer
    ) -> answer_view.Comparison | None:
        if not self._output.compare:
            return None
        plain_generation = self._generation | {"drafter": _plain()}
        began = time.perf_counter()
        with self._terminal.working("comparing with plain decoding"):
            pairs = [(answer, self._rag.ask(question, history=history, **plain_generation))]
            while len(pairs) < _MAX_PAIRS and time.perf_counter() - began < _MAX_COMPARE_SECONDS:
                ours = self._rag.ask(question, history=history, **self._generation)
                pairs.append((ours, self._rag.ask(question, history=history, **plain_generation)))
        return answer_view.Comparison.of(pairs)

    def _report(
        self, answer: Answer, comparison: answer_view.Comparison | None, document: dict[str, Any]
    ) -> None:
        terminal, output = self._terminal, self._output
        if output.json:
            document["conversation"] = self._conversation.number
            document["model"] = self.model
            terminal.json(document)
        elif not output.plain or output.show_sources:
            if not answer.answered:
                answer_view.show_nearest(terminal, answer)
            answer_view.show_sources(terminal, answer, everything=output.show_sources)
        if not answer.answered:
            terminal.note(answer_view.refusal_line(answer))
        if output.show_stats:
            terminal.note("")
            terminal.note(answer_view.stats_table(answer, self.seconds))
        if answer.finish_reason == "length" and answer.answered:
            terminal.note(
                "the answer was cut at --max-tokens: raise it for a longer one", style="yellow"
            )
        if answer.dropped_passages:
            dropped = len(answer.dropped_passages)
            terminal.note(f"{dropped} of the passages found did not fit into the prompt")
        if not output.json:
            terminal.note("")
        terminal.note(answer_view.speed_line(answer, comparison))


_WARM_UP = {"max_new_tokens": 1}


def _plain() -> object:
    from ragaccel.decoding.session import NoDrafter

    return NoDrafter()


def _without_texts(document: dict[str, Any]) -> dict[str, Any]:
    """Return an answer's JSON for the history, which keeps sources without their texts."""
    kept = {k: v for k, v in document.items() if k not in ("question", "answer", "dropped_sources")}
    kept["sources"] = [{k: v for k, v in s.items() if k != "text"} for s in document["sources"]]
    return kept


class Conversation:
    """A conversation about one source, written to the history as it goes.

    If the history cannot be written (a damaged file, a full disk), the terminal shows one warning
    and the conversation continues without the history.
    """

    def __init__(self, terminal: Terminal, source: str, *, resume: bool = False) -> None:
        self._terminal = terminal
        self._source = source
        self._exchanges: list[tuple[str, str]] = []
        self._question = ""
        self._turn: int | None = None
        self.number: int | None = None
        self._history: History | None = None
        try:
            self._history = History()
            if resume:
                self._resume(self._history)
        except HistoryError as error:
            self._disable_history(error)

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation so far as chat messages, oldest first."""
        return [
            {"role": role, "content": content}
            for exchange in self._exchanges
            for role, content in zip(("user", "assistant"), exchange, strict=True)
        ]

    def start_over(self) -> None:
        """Begin a new conversation; the history keeps the old one."""
        self._exchanges, self.number = [], None

    def begin(self, question: str, model: str) -> None:
        """Write a question to the history, before it is answered."""
        self._question, self._turn = question, None
        if self._history is None:
            return
        try:
            if self.number is None:
                self.number = self._history.open_conversation(self._source)
            self._turn = self._history.begin(self.number, question, model)
        except HistoryError as error:
            self._disable_history(error)

    def end(self, answer: str, state: str, details: dict[str, Any] | None = None) -> None:
        """Write the answer and its state to the history."""
        if state == "answered":
            self._exchanges.append((self._question, answer))
        if self._history is None or self._turn is None:
            return
        try:
            self._history.finish(self._turn, answer, state, details)
        except HistoryError as error:
            self._disable_history(error)

    def close(self) -> None:
        """Close the history file."""
        if self._history is not None:
            self._history.close()

    def _resume(self, history: History) -> None:
        self.number = history.last_conversation(self._source)
        if self.number is None:
            self._terminal.note(
                "there is no earlier conversation about these documents; a new one begins"
            )
        else:
            self._exchanges = history.exchanges(self.number)

    def _disable_history(self, error: Exception) -> None:
        self._terminal.warn(f"this conversation is not written to the history: {error}")
        if self._history is not None:
            self._history.close()
        self._history = None


def choose_adapter(settings: Settings) -> str | bool | None:
    """Return the SPACE adapter to attach: a name, True for the model's own, or None for none."""
    drafter, space = settings.drafter, settings.space
    if drafter in ("trees", "copy"):
        return None
    return space or (drafter is not None or None)


def make_drafter(settings: Settings, llm: LLM) -> Drafter | None:
    """Return the drafter of the settings, or None for the default.

    The default drafts token trees, and mask predictions if a SPACE adapter is attached.
    """
    kind = settings.drafter
    if kind == "copy":
        from ragaccel.drafting.ngram import CopyDrafter

        return CopyDrafter()
    if kind == "space":
        from ragaccel.drafting.space import SpaceDrafter

        return SpaceDrafter(llm.mask_ids)
    return None


_NUM_CANDIDATES = 6  # passages whose sentences are compared with the question


class TimedRetriever:
    """A retriever that times its searches and raises an error if it finds nothing.

    ``stdin_passages`` go before those found; ``seconds`` sums the time of all searches.

    Args:
        retriever: Finds the passages of an answer.
        name: Name of the searched source, for messages.
        passage_retriever: Finds the whole passages whose sentences :meth:`nearest` compares.
    """

    def __init__(self, retriever: PassageSource, name: str, passage_retriever: Retriever) -> None:
        self._retriever = retriever
        self._name = name
        self._passage_retriever = passage_retriever
        self.stdin_passages: Sequence[Passage] = ()
        self.seconds = 0.0

    def search(self, query: str, k: int = 6) -> list[Passage]:
        """Return the passages from stdin, then the nearest ones of the index, k in all.

        Raises:
            EmptyIndexError: There are no passages.
        """
        began = time.perf_counter()
        passages = [*self.stdin_passages, *self._retriever.search(query, k)][:k]
        self.seconds += time.perf_counter() - began
        if not passages:
            raise EmptyIndexError(f"no passage of {self._name} matches the question")
        return passages

    @property
    def embedder(self) -> Embedder:
        """The embedding model of the index."""
        return self._passage_retriever.embedder

    def nearest(self, query: str, k: int = 3) -> list[NearestSentence]:
        """Return the k passages of stdin or index whose sentences are nearest to a question."""
        found = [
            *self.stdin_passages,
            *self._passage_retriever.search(query, max(k, _NUM_CANDIDATES)),
        ]
        return nearest_sentences(self.embedder, query, found)[:k]


def split_stdin(text: str, question: str, embedder: Embedder, limit: int) -> list[Passage]:
    """Split text from stdin into passages; keep the ``limit`` nearest to the question, in order."""
    from ragaccel.passage import Document
    from ragaccel.retrieval.chunking import split_document

    document = Document(path="<stdin>", text=text)
    passages = split_document(document, embedder.count_tokens, embedder.max_tokens)
    if len(passages) <= limit:
        return passages
    nearness = embedder.embed_documents([p.text for p in passages]) @ embedder.embed_query(question)
    nearest = sorted(range(len(passages)), key=lambda i: -float(nearness[i]))[:limit]
    return [passages[i] for i in sorted(nearest)]


class ChatSession:
    """An open index and model that answer questions about one source."""

    def __init__(
        self,
        opened: OpenIndex,
        search: TimedRetriever,
        answerer: Answerer,
        conversation: Conversation,
    ) -> None:
        self._index = opened
        self._search = search
        self._answerer = answerer
        self.conversation = conversation
        self.last: Answer | None = None

    def ask(self, question: str, context: str = "") -> Answer:
        """Answer a question; ``context`` is text to use beside the documents."""
        embedder = self._index.embedder
        limit = max(1, self._index.k // 2)
        self._search.stdin_passages = (
            split_stdin(context, question, embedder, limit) if context else ()
        )
        self.last = self._answerer.ask(question)
        return self.last


@contextmanager
def open_session(
    terminal: Terminal,
    source: Source,
    settings: Settings,
    *,
    output: OutputOptions,
    resume: bool = False,
) -> Iterator[ChatSession]:
    """Index what is new, load the model, open the history and yield a session with them.

    Raises:
        EmptyIndexError: The index is empty.
        ModelNotFoundError, UnsupportedModelError: The model cannot be used.
    """
    from ragaccel.rag import RAG

    began = time.perf_counter()
    with open_index(terminal, source, settings) as opened:
        indexed = time.perf_counter()
        llm = load_llm(terminal, settings)
        if settings.memory not in (None, "off"):  # until its end the drafter learns nothing
            wait_for_jit_warmup(terminal)
        search = TimedRetriever(_passage_source(opened, settings), source.name, opened.retriever)
        rag = RAG(llm, search, k=opened.k, max_new_tokens=settings.max_tokens)
        conversation = Conversation(terminal, source.name, resume=resume)
        generation: dict[str, Any] = {
            "temperature": settings.temperature,
            "seed": settings.seed,
        }
        drafter = make_drafter(settings, llm)
        if drafter is not None:
            generation["drafter"] = drafter
        answerer = Answerer(
            terminal, rag, search, conversation, output=output, generation=generation
        )
        answerer.model = settings.model or "bundled reader"
        answerer.seconds = {"index": indexed - began, "load": time.perf_counter() - indexed}
        try:
            yield ChatSession(opened, search, answerer, conversation)
        finally:
            conversation.close()


def _passage_source(opened: OpenIndex, settings: Settings) -> PassageSource:
    """Return the retriever for answers; the bundled reader needs one that compresses passages."""
    if settings.model is not None:
        return opened.retriever
    from ragaccel.retrieval.compression import CompressingRetriever

    # values chosen with the reader on held-out questions: python -m eval questions --held-out
    return CompressingRetriever(opened.retriever, sentences=1, margin=0.05)


def load_llm(terminal: Terminal, settings: Settings, **options: Any) -> LLM:
    """Load the language model that the settings name, or the bundled reader.

    Raises:
        ModelNotFoundError, UnsupportedModelError: The model cannot be used.
    """
    terminal.show_log_warnings()
    name, memory = settings.model, settings.memory
    if name is None:
        from ragaccel.llm import BUNDLED_READER_NOTICE, SUGGESTED_MODEL

        terminal.note(f"{BUNDLED_READER_NOTICE} (a larger one: --model {SUGGESTED_MODEL}, 3 GB)")
    with terminal.working("loading the model"):
        from ragaccel.llm import LLM
        from ragaccel.models.load import bundled_reader_path

        name = name or str(bundled_reader_path())
        return LLM.load(
            name,
            space=choose_adapter(settings),
            dtype=settings.dtype,
            device=settings.device,
            memory=None if memory == "off" else memory,
            remember=memory != "off",
            **options,
        )


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a source; ``context`` is text from stdin, or empty."""

    source: Source
    text: str
    context: str = ""


def read_question(
    terminal: Terminal,
    target: str | None,
    text: str | None,
    index: Path | None,
    *,
    subcommand: str = "ask",
) -> Question:
    """Read a question from the command line and stdin.

    With --index the folder may be left out: a single argument is then the question. Without a
    question on the command line, stdin is the question; else stdin is its context.

    Raises:
        UsageError: There is no question, or no source to ask.
    """
    if index is not None and text is None and target is not None and not _is_folder(target):
        target, text = None, target
    source = resolve_source(target, index)
    stdin_text = read_stdin(terminal)
    if text is not None and text.strip() not in ("", "-"):
        return Question(source, text.strip(), stdin_text)
    if not stdin_text:
        wanted, example = ("question", "Who …?") if subcommand == "ask" else ("query", "…")
        raise UsageError(
            f'what is the {wanted}? e.g. ragaccel {subcommand} {source.argument} "{example}"'
        )
    return Question(source, stdin_text)


def _is_folder(text: str) -> bool:
    """Return whether a text names a folder; it may be a question too long for a file name."""
    import os
    from pathlib import Path

    return os.path.isdir(Path(text).expanduser())
