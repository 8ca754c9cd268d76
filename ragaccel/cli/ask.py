"""Asking: the commands ask, chat and search, and the session that answers questions."""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ragaccel.cli import answer_view
from ragaccel.cli.index import Source, open_index, resolve_source
from ragaccel.cli.models import resolve_model
from ragaccel.cli.settings import Index, Json, Output, Settings, Target
from ragaccel.cli.terminal import (
    ExitCode,
    MarkedAnswer,
    Terminal,
    UsageError,
    WordWrap,
    exit_code_of,
    explain,
    printable,
)
from ragaccel.errors import EmptyIndexError, RagaccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ragaccel.answer import Answer, Stream
    from ragaccel.cli.history import Conversation
    from ragaccel.decoding.session import Drafter
    from ragaccel.llm import LLM
    from ragaccel.passage import NearestSentence, Passage
    from ragaccel.rag import RAG
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.retriever import Retriever
    from ragaccel.retrieval.store import Store


def ask(
    terminal: Terminal,
    target: Target = None,
    question: Annotated[
        str | None,
        Argument(
            metavar="QUESTION", help="The question; without it, stdin is read.", show_default=False
        ),
    ] = None,
    index: Index = None,
    *,
    settings: Settings,
    output: Output,
) -> ExitCode:
    """Index what is new in a folder, then answer a question from it.

    If a question is given, text from stdin is used as context beside the documents.

    If they do not answer the question, the nearest passages are shown and the exit code is 5.
    """
    if output.compare and output.no_accel:
        raise UsageError("--compare already measures against --no-accel: give only one of the two")
    asked = read_question(terminal, target, question, index)
    with open_session(terminal, asked.source, settings, output) as session:
        return session.ask(asked.text, asked.context)


_HELP = """\
/passages  list every passage found for the last question
/new       start a new conversation
/quit      leave (Ctrl-D does, too)"""


def chat(
    terminal: Terminal,
    target: Target = None,
    index: Index = None,
    *,
    settings: Settings,
    output: Output,
) -> ExitCode:
    """Ask one question after the other.

    Questions may refer to earlier ones, and with --continue to those of the last conversation.

    Questions are read from the terminal, or from a pipe, one a line. With a pipe each is repeated
    before its answer, and the exit code is 5 if the documents do not answer one of them. --json
    prints a document a line.
    """
    terminal.json_indent = None
    source = resolve_source(target, index)
    codes = [ExitCode.OK]
    with open_session(terminal, source, settings, output) as session:
        if sys.stdin.isatty():
            terminal.note("type a question, /help, or Ctrl-D to leave")
        while (line := _read_line(terminal)) not in (None, "/quit", "/exit"):
            if line and line.startswith("/"):
                _run_command(terminal, session, line)
            elif line:
                if not (sys.stdin.isatty() or output.json or output.plain):
                    terminal.write("\n" * (len(codes) > 1) + f"> {printable(line)}\n")
                codes.append(_answer(terminal, session, line))
    if sys.stdin.isatty():
        return ExitCode.OK
    # a failure outranks a question that was not answered
    return max(codes, key=lambda code: 0.5 if code == ExitCode.NOT_ANSWERED else code)


def _read_line(terminal: Terminal) -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline().decode("utf-8", "replace")
        return line.strip() if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  (adds line editing and history to input())
    try:
        return terminal.err.input("\n[bold]> [/]").strip()
    except EOFError:
        terminal.note("")
        return None


def _answer(terminal: Terminal, session: ChatSession, question: str) -> ExitCode:
    """Answer one question of a chat; an error or Ctrl-C ends this answer only."""
    try:
        return session.ask(question)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        terminal.note("interrupted")
        return ExitCode.INTERRUPTED
    except RagaccelError as error:
        terminal.fail(explain(error))
        return exit_code_of(error)


def _run_command(terminal: Terminal, session: ChatSession, line: str) -> None:
    if line == "/new":
        session.conversation.start_over()
        terminal.note("a new conversation begins")
    elif line == "/passages" and session.last is not None:
        answer_view.show_passages(terminal, session.last, everything=True)
    elif line == "/passages":
        terminal.note("nothing was asked yet")
    else:
        terminal.note(_HELP)


def search(
    terminal: Terminal,
    target: Target = None,
    query: Annotated[
        str | None,
        Argument(metavar="QUERY", help="The text to search for; without it, stdin is read."),
    ] = None,
    index: Index = None,
    mode: Annotated[
        Literal["fused", "dense", "text"],
        Option(help="Rank by meaning and words, by meaning, or by words (BM25)."),
    ] = "fused",
    full: Annotated[bool, Option("--full", help="Print whole passages, not only a part.")] = False,
    json: Json = False,
    *,
    settings: Settings,
) -> None:
    """Find passages and show their scores, without a language model.

    What is new in the folder is indexed first.
    """
    asked = read_question(terminal, target, query, index, subcommand="search")
    from ragaccel.retrieval.compression import best_sentences

    with open_index(terminal, asked.source, settings) as retriever:
        passages = retriever.search(asked.text, settings.k, mode=mode)
        best = best_sentences(retriever.embedder, asked.text, () if json else passages)
        advice = advise_embedder(settings.embedder, retriever.store, passages)
    if json:
        found = [answer_view.passage_json(passage) for passage in passages]
        terminal.json({"query": asked.text, "mode": mode, "passages": found})
    if not passages:
        raise EmptyIndexError(f"no passage of {asked.source.name} matches the query")
    for number, sentence in enumerate(best, start=1):
        answer_view.show_found(terminal, number, sentence, full=full)
    for line in advice:
        terminal.note(line)


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
    """
    if index is not None and text is None and not _is_folder(target):
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


def _is_folder(text: str | None) -> bool:
    """Return whether a text names a folder; it may be a question too long for a file name."""
    return text is not None and os.path.isdir(Path(text).expanduser())


_STDIN_SECONDS = 2.0  # without input, after which a note says that stdin is being read
_MAX_STDIN_BYTES = 4 << 20
_STDIN = "<stdin>"  # the path of its passages


def read_stdin(terminal: Terminal) -> str:
    """Read all text from stdin; return "" if it is a terminal or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    from ragaccel.retrieval.loaders import decode_text

    with suppress(OSError, ValueError):  # this system has no select for pipes
        if not select.select([sys.stdin], [], [], _STDIN_SECONDS)[0]:
            terminal.note("reading stdin until it ends (to give no input, add </dev/null)")
    raw = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(raw) > _MAX_STDIN_BYTES:
        raise UsageError("stdin holds more than 4 MB: save it to a file of the folder instead")
    if b"\0" in raw[:8192]:
        raise UsageError("stdin holds binary data; only text can be read from it")
    return decode_text(raw)[0].strip()


# --compare times at most this many pairs of answers, and no further pair after this many seconds
_MAX_PAIRS = 3
_MAX_COMPARE_SECONDS = 4.0


@dataclass(slots=True)
class ChatSession:
    """A model and an open index that answer questions; answers are shown and logged.

    ``generation`` holds the settings of every answer, ``model`` the name for the history,
    ``seconds`` the time of the stages before the answer by name, e.g. ``"index"``, ``embedder`` the
    setting, and ``hint`` the line that names a larger model than the built-in one.
    """

    terminal: Terminal
    output: Output
    rag: RAG
    search: TimedRetriever
    conversation: Conversation
    generation: dict[str, Any]
    model: str
    seconds: dict[str, float]
    embedder: str | None = None
    hint: str = ""
    last: Answer | None = None
    partial_text: str = ""
    warned: bool = False

    def ask(self, question: str, context: str = "") -> ExitCode:
        """Answer a question, show the answer and write it to the history, even if incomplete.

        ``context`` is text to use beside the documents.
        """
        from ragaccel.quotes import refers, with_previous_question

        terminal, search = self.terminal, self.search
        search.stdin_text = context
        search.stdin_passages = split_stdin(context, question, search.embedder, self.rag.k)
        history = self.conversation.messages()
        search.expect(question, with_previous_question(question, history))
        if self.hint and not self.warned and refers(question, history):
            terminal.note(_NO_REWRITING)
            self.warned = True
        ask = partial(self.rag.ask, question, history)
        self.conversation.begin(question, self.model)
        self.partial_text = ""
        try:
            if self.output.compare:  # the first request of a process also pays for lazy set-up
                wait_for_jit_warmup(terminal)
                ask(**self.generation | {"max_new_tokens": 1})
            search.seconds = 0.0
            terminal.separate()
            began = time.perf_counter()
            answer = self._show_answer(question, ask)
            # checking a quote also searches; generation is timed by itself
            waited = time.perf_counter() - began - answer.stats.total_seconds
            self.seconds["retrieve"] = max(search.seconds, waited)
            comparison = self._compare(ask, answer) if self.output.compare else None
        except BaseException as error:
            self.conversation.fail(self.partial_text, error)
            raise
        details = answer_view.answer_json(question, answer, self.seconds, comparison)
        self.conversation.finish(answer.text, _without_texts(details))
        self._report(answer, comparison, details)
        self.last = answer
        return ExitCode.OK if answer.answered else ExitCode.NOT_ANSWERED

    def _show_answer(self, question: str, ask: Callable[..., Answer]) -> Answer:
        if not (self.output.json or self.output.no_stream or self.rag.llm.is_bundled_reader):
            history = self.conversation.messages()
            with self.rag.stream(question, history, **self.generation) as stream:
                self._show_pieces(self._pieces(stream), stream.passages)
                return stream.answer
        with self.terminal.working("reading the passages"):
            answer = ask(**self.generation)
        self.partial_text = answer.text
        if not (self.output.json or self._shows_quote):
            self._show_pieces([answer.text], answer.passages)
        return answer

    @property
    def _shows_quote(self) -> bool:
        """Whether passages are shown with the built-in model's quote below."""
        return self.rag.llm.is_bundled_reader and not self.output.plain

    def _pieces(self, stream: Stream) -> Iterator[str]:
        """Yield and keep the pieces of a stream; show a spinner until the first."""
        with self.terminal.working("reading the passages"):
            piece = next(stream, None)
        while piece is not None:
            self.partial_text += piece
            yield piece
            piece = next(stream, None)

    def _show_pieces(self, pieces: Iterable[str], passages: Sequence[Passage]) -> None:
        from ragaccel.answer import Highlighter

        if self.output.plain:
            wrap = WordWrap(self.terminal.write, self.terminal.wrap_width)
            for piece in pieces:
                wrap.feed(printable(piece))
            wrap.finish()
            self.terminal.write("\n")
            return
        highlighter, marked = Highlighter(passages), MarkedAnswer(self.terminal)
        try:
            for piece in pieces:
                marked.add(highlighter.feed(piece))
        finally:  # show the pieces that came before an interruption, too
            marked.add(highlighter.finish())
            marked.finish()

    def _compare(self, ask: Callable[..., Answer], answer: Answer) -> answer_view.Comparison:
        plain = self.generation | _plain_decoding()
        began = time.perf_counter()
        with self.terminal.working("comparing with plain decoding"):
            pairs = [(answer, ask(**plain))]
            while len(pairs) < _MAX_PAIRS and time.perf_counter() - began < _MAX_COMPARE_SECONDS:
                pairs.append((ask(**self.generation), ask(**plain)))
        return answer_view.Comparison.of(pairs)

    def _report(
        self, answer: Answer, comparison: answer_view.Comparison | None, document: dict[str, Any]
    ) -> None:
        terminal, output = self.terminal, self.output
        advice = advise_embedder(self.embedder, self.search.store, answer.passages)
        if output.json:
            document["conversation"] = self.conversation.number
            document["model"] = self.model
            terminal.json(document)
        elif self._shows_quote:
            notes = [self.hint] if self.last is None else []
            answer_view.show_quote(terminal, answer, [*notes, *advice], self.search.around)
            if output.show_passages:
                answer_view.show_passages(terminal, answer, everything=True)
        elif not output.plain or output.show_passages:
            if answer.nearest:
                terminal.write("\nNearest in the documents:\n")
                answer_view.show_nearest(terminal, answer, _NEAREST_LINES, self.search.around)
            answer_view.show_passages(terminal, answer, everything=output.show_passages)
        if not (answer.answered or self._shows_quote):
            terminal.note(answer_view.refusal_line(answer))
        for line in advice if output.json or not self._shows_quote else ():
            terminal.note(line)
        if output.stats:
            terminal.note("")
            terminal.note(answer_view.stats_table(answer, self.seconds))
        if answer.finish_reason == "length" and answer.answered:
            terminal.note(
                "the answer was cut at --max-new-tokens: raise it for a longer one", style="yellow"
            )
        if dropped := len(answer.dropped_passages):
            terminal.note(f"{dropped} of the passages found did not fit into the prompt")
        if not (output.json or self._shows_quote):
            terminal.note("")
        first = self.last is None  # what indexing and loading took belongs to no later answer
        seconds = self.seconds if first else {"retrieve": self.seconds["retrieve"]}
        terminal.note(answer_view.totals_line(answer, seconds, comparison))


_NEAREST_LINES = 15
_NO_REWRITING = (
    "the built-in model cannot rewrite a follow-up: it is judged together with the previous one"
)


def _plain_decoding() -> dict[str, Any]:
    from ragaccel.decoding.session import NoDrafter

    return {"drafter": NoDrafter()}


def _without_texts(document: dict[str, Any]) -> dict[str, Any]:
    """Return an answer's JSON for the history, which keeps passages without their texts."""
    left_out = ("question", "answer", "dropped_passages")
    kept = {name: value for name, value in document.items() if name not in left_out}
    for name in ("passages", "sources"):
        kept[name] = [{k: v for k, v in each.items() if k != "text"} for each in document[name]]
    return kept


class TimedRetriever:
    """A retriever that times its searches and raises an error if it finds nothing.

    ``stdin_passages`` go before those found; ``stdin_text`` is what they are from, whole;
    ``seconds`` sums the time of all searches.

    Args:
        terminal: Shows a question that was rewritten before it is searched.
        retriever: Finds whole passages.
        name: Name of the searched source, for messages.
        compress: Answer from the sentences nearest to the question, not from whole passages.
    """

    def __init__(
        self, terminal: Terminal, retriever: Retriever, name: str, *, compress: bool
    ) -> None:
        from ragaccel.rag import READER_SENTENCES
        from ragaccel.retrieval.compression import CompressingRetriever

        self._terminal = terminal
        self._retriever = retriever
        self._name = name
        self._compressing = CompressingRetriever(retriever, sentences=READER_SENTENCES)
        self._answering = self._compressing if compress else retriever
        self._shown: set[str] = set()
        self.stdin_passages: Sequence[Passage] = ()
        self.stdin_text = ""
        self.seconds = 0.0

    def expect(self, *queries: str) -> None:
        """Take these queries as known; any other one is shown when it is searched."""
        self._shown, self.seconds = set(queries), 0.0

    def search(self, query: str, k: int = 6) -> list[Passage]:
        """Return the passages from stdin, then the nearest ones of the index, k in all."""
        if query not in self._shown:
            self._shown.add(query)
            self._terminal.note(f"searching: {query}")
        began = time.perf_counter()
        passages = [*self.stdin_passages, *self._answering.search(query, k)][:k]
        self.seconds += time.perf_counter() - began
        if not passages:
            raise EmptyIndexError(f"no passage of {self._name} matches the question")
        return passages

    def document_passages(self, path: str) -> list[Passage]:
        """Return the passages of a file of the index, or all text from stdin as one."""
        from ragaccel.passage import Passage

        if path == _STDIN:
            return [Passage(path, self.stdin_text, path=path)]
        return self._retriever.document_passages(path)

    def around(self, passage: Passage) -> tuple[str, str]:
        """Return the text of the passages before and after one in its file, or "" for none."""
        document = self.document_passages(passage.path)
        before = [one.text for one in document if one.end <= passage.start]
        after = [one.text for one in document if one.start >= passage.end]
        return "".join(before[-1:]), "".join(after[:1])

    @property
    def store(self) -> Store:
        """The index."""
        return self._retriever.store

    @property
    def embedder(self) -> Embedder:
        """The embedding model of the index."""
        return self._retriever.embedder

    def nearest(self, query: str, k: int = 6) -> list[NearestSentence]:
        """Return the k best passages of stdin, then of the index, each with its best sentence."""
        from ragaccel.retrieval.compression import best_sentences, likeliest_sentences

        began = time.perf_counter()
        found = likeliest_sentences(query, self.stdin_passages, self.embedder)
        found = found or best_sentences(self.embedder, query, self.stdin_passages)
        found = [*found, *self._compressing.nearest(query, k)][:k]
        self.seconds += time.perf_counter() - began
        return found


_ADVISED = "advised on the embedder"
_MULTILINGUAL = (
    "not in English? --embedder intfloat/multilingual-e5-small (0.47 GB) searches better"
)


def advise_embedder(embedder: str | None, store: Store, passages: Sequence[Passage]) -> list[str]:
    """Return a line that names an embedder for other languages, once for an index.

    It is empty if most of the passages found are in English, or the settings name an embedder.
    """
    from ragaccel.retrieval.language import is_english

    english = sum(is_english(passage.text) for passage in passages)
    if embedder is not None or 2 * english >= len(passages) or store.meta(_ADVISED):
        return []
    with suppress(RagaccelError), store.writing():  # an index that is not writable is told again
        store.set_meta(_ADVISED, "yes")
    return [_MULTILINGUAL]


def split_stdin(text: str, question: str, embedder: Embedder, k: int) -> list[Passage]:
    """Split text from stdin into passages; keep the nearest to the question, up to half of k."""
    from ragaccel.passage import Document
    from ragaccel.retrieval.chunking import split_document

    if not text:
        return []
    limit = max(1, k // 2)
    document = Document(path=_STDIN, text=text)
    passages = split_document(document, embedder.count_tokens, embedder.max_tokens)
    if len(passages) <= limit:
        return passages
    nearness = embedder.embed_documents([p.text for p in passages]) @ embedder.embed_query(question)
    nearest = sorted(range(len(passages)), key=lambda i: -float(nearness[i]))[:limit]
    return [passages[i] for i in sorted(nearest)]


@contextmanager
def open_session(
    terminal: Terminal, source: Source, settings: Settings, output: Output
) -> Iterator[ChatSession]:
    """Index what is new, load the model, open the history and yield a session with them."""
    from ragaccel.cli.history import Conversation
    from ragaccel.rag import RAG

    if settings.model is not None:
        resolve_model(terminal, settings.model)  # a wrong name costs no time for indexing
    began = time.perf_counter()
    with open_index(terminal, source, settings) as retriever:
        indexed = time.perf_counter()
        llm = load_llm(terminal, settings)
        if settings.memory not in (None, "off"):  # until its end the drafter learns nothing
            wait_for_jit_warmup(terminal)
        search = TimedRetriever(terminal, retriever, source.name, compress=llm.is_bundled_reader)
        drafter = make_drafter(settings, llm)
        generation: dict[str, Any] = {"temperature": settings.temperature, "seed": settings.seed}
        if drafter is not None:
            generation["drafter"] = drafter
        if output.no_accel:
            generation |= _plain_decoding()
        if output.compare:  # else the second answer would be drafted from the remembered first
            generation["remember"] = False
        with closing(Conversation(terminal, source.name, resume=output.resume)) as conversation:
            yield ChatSession(
                terminal,
                output,
                RAG(llm, search, k=settings.k, max_new_tokens=settings.max_new_tokens),
                search,
                conversation,
                generation,
                model=settings.model or "bundled reader",
                seconds={"index": indexed - began, "load": time.perf_counter() - indexed},
                embedder=settings.embedder,
                hint=model_hint() if llm.is_bundled_reader else "",
            )


def load_llm(terminal: Terminal, settings: Settings, **options: Any) -> LLM:
    """Load the language model that the settings name, or the bundled reader."""
    terminal.show_log_warnings()
    name, memory = settings.model, settings.memory
    with terminal.working("loading the model"):
        from ragaccel.llm import LLM
        from ragaccel.models.load import bundled_reader_path

        return LLM.load(
            name or str(bundled_reader_path()),
            space=choose_adapter(settings),
            dtype=settings.dtype,
            device=settings.device,
            memory=None if memory == "off" else memory,
            remember=memory != "off",
            **options,
        )


def model_hint() -> str:
    """Return the line that names a model that answers in its own words."""
    from ragaccel.models.hub import suggested_model

    name, gigabytes = suggested_model()
    return f"answers in words: --model {name} ({gigabytes:g} GB)"


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
    if settings.drafter == "copy":
        from ragaccel.drafting.ngram import CopyDrafter

        return CopyDrafter()
    if settings.drafter == "space":
        from ragaccel.drafting.space import SpaceDrafter

        return SpaceDrafter(llm.mask_ids)
    return None


def wait_for_jit_warmup(terminal: Terminal) -> None:
    """Wait until compiled functions are ready: about ten seconds the first time on a machine."""
    from ragaccel.drafting.policy import JIT_WARMUP

    with terminal.working("compiling (only the first time on this machine)"):
        JIT_WARMUP.wait(_JIT_WARMUP_SECONDS)


_JIT_WARMUP_SECONDS = 60.0
