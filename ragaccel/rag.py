"""RAG: retrieve passages for a question, and generate an answer from them.

What the bundled reader says is judged by ``ragaccel.quotes``.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ragaccel.answer import AsyncStream, await_answer, run_in_thread
from ragaccel.config import check_settings
from ragaccel.errors import (
    ConfigurationError,
    EmptyIndexError,
    brief,
    positive,
    text,
)
from ragaccel.passage import NearestSentence, as_document
from ragaccel.paths import claim_torch
from ragaccel.prompt import Prompt, as_messages, build_prompt, check_template, renders_system
from ragaccel.quotes import (
    NOT_FOUND,
    NOT_TOLD,
    QuoteConstraint,
    check_quote,
    is_refusal,
    refuse,
    values_of,
    with_nearest,
    with_previous_question,
    with_refusal,
)
from ragaccel.retrieval.compression import CompressingRetriever
from ragaccel.retrieval.language import is_foreign
from ragaccel.retrieval.source import as_source, find_passages

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from ragaccel.answer import Answer, Stream
    from ragaccel.config import Settings
    from ragaccel.drafting.answer_memory import AnswerMemory
    from ragaccel.llm import LLM
    from ragaccel.passage import Passage
    from ragaccel.prompt import History, Message, Template
    from ragaccel.retrieval.embedder import AnyEmbedder, Embedder
    from ragaccel.retrieval.indexing import Progress
    from ragaccel.retrieval.source import PassageSource
    from ragaccel.retrieval.store import Store


logger = logging.getLogger("ragaccel")

_NAMED_FILES = 10  # of those that cannot be read

_SEARCH_FACTOR = 8  # this many times k passages are retrieved if some are unreadable
READER_SENTENCES = 5
"""The number of sentences that the bundled reader chooses from."""


class RAG:
    """A model and a retriever that answer questions from retrieved passages.

    Args:
        llm: the model that answers: an ``LLM``, or what ``LLM.load`` takes: a folder, a name on
            the hub, or None for the bundled reader.
        retriever: finds the passages: an object with ``search(query, k)``, a function of the
            query, or a retriever of LangChain or LlamaIndex. It may return strings, dictionaries
            with a ``text``, passages or documents.
        k: the number of passages to retrieve.
        system: instructions for the model, before the chat.
        template: the prompt template; see ``build_prompt``.
        max_new_tokens: the maximum number of tokens of an answer; the prompt leaves room for them.
        rewrite: with a history, let the model first write the question anew so that it can be
            searched for without the chat ("And in winter?"). The bundled reader cannot.
        answers: a memory of earlier answers; answers to similar questions serve as drafts.
        check_quotes: show the bundled reader's text only if it quotes a passage that is relevant
            to the question (``ragaccel.quotes``); otherwise ``Answer.refusal`` gives the reason.
            A checked answer is streamed in one piece. Other models are not checked.

    Raises:
        ConfigurationError: an argument has the wrong type; the message shows the right form.

    >>> rag = RAG.from_texts(["The tide rises four metres at the mole.", "The lamp burns oil."])
    >>> rag.ask("How many metres does the tide rise?").text
    'The tide rises four metres at the mole. [1]'
    """

    def __init__(
        self,
        llm: LLM | str | Path | None,
        retriever: PassageSource | Callable[..., Any] | Any,
        *,
        k: int = 6,
        system: str | None = None,
        template: Template | None = None,
        max_new_tokens: int = 256,
        rewrite: bool = True,
        answers: AnswerMemory | None = None,
        check_quotes: bool = True,
    ) -> None:
        k, max_new_tokens = positive("k", k), positive("max_new_tokens", max_new_tokens)
        check_template(template)
        if not (answers is None or hasattr(answers, "similar")):
            raise ConfigurationError(f"answers must be an AnswerMemory, not {brief(answers)}")
        self.system = None if system is None else text("system", system)
        self.retriever = as_source(retriever)
        self.llm = as_llm(llm)
        self.k, self.template, self.max_new_tokens = k, template, max_new_tokens
        self.rewrite, self.answers, self.check_quotes = rewrite, answers, check_quotes

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[Any],
        llm: LLM | str | Path | None = None,
        *,
        path: str | Path | None = None,
        embedder: AnyEmbedder = None,
        **options: Any,
    ) -> RAG:
        """Answer questions from texts; long ones are split into passages.

        Args:
            texts: strings, dictionaries with a ``text`` (and ``title``, ``source`` or ``id``,
                ``page``, ``line``), passages or documents, also those of LangChain and LlamaIndex.
            llm: the model, as in ``RAG``.
            path: an index file that keeps the texts; it then holds these and no others, and texts
                that it has already are not embedded again. By default they are in memory.
            embedder: an embedding model, its folder or hub name, or a function from a list of
                strings to vectors.
            **options: those of ``RAG``.

        Raises:
            ConfigurationError: there is no text, or an argument has the wrong type.
        """
        if isinstance(texts, str | Mapping) or not isinstance(texts, Iterable):
            raise ConfigurationError(f"texts must be a list of texts, not {brief(texts)}")
        if hasattr(texts, "iterrows"):  # it iterates the names of its columns
            raise ConfigurationError('for a table, give texts=table.to_dict("records")')
        documents = [as_document(item, f"text-{n}") for n, item in enumerate(texts, start=1)]
        if not any(document.text.strip() for document in documents):
            raise ConfigurationError("there is no text to answer from: give at least one")
        from ragaccel.retrieval.indexing import index_documents

        index = partial(index_documents, documents=documents)
        return cls._over(llm, path, embedder, index, options)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        llm: LLM | str | Path | None = None,
        *,
        path: str | Path | None = None,
        embedder: AnyEmbedder = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Any,
    ) -> RAG:
        """Answer questions from the documents of a folder.

        Files that cannot be read are left out and named in a warning of the logger ``ragaccel``.

        Args:
            folder: the folder; the formats are those of ``index_folder``.
            llm: the model, as in ``RAG``.
            path: an index file, in which only new and changed files are embedded the next time;
                by default the index is in memory. ``default_index_path(folder)`` is the file that
                the command line uses.
            embedder: as in ``from_texts``.
            progress: called with the progress of indexing; by default a bar is shown on stderr if
                indexing takes long.
            **options: as in ``from_texts``.

        Raises:
            ConfigurationError: there is no such folder, or an argument has the wrong type.
            EmptyIndexError: the folder holds no document that can be read.
        """
        from ragaccel.retrieval.indexing import index_folder

        if not (
            isinstance(folder, str | os.PathLike) and os.path.isdir(os.path.expanduser(folder))
        ):
            raise ConfigurationError(f"there is no folder {brief(folder)}: give that of documents")

        def index(store: Store, embedder: Embedder) -> None:
            with _progress_bar(progress) as tell:
                report = index_folder(store, embedder, folder, progress=tell)
            reasons = [f"{path}: {reason}" for path, reason in report.failed.items()]
            more = [f"{len(reasons) - _NAMED_FILES} more"][: len(reasons) > _NAMED_FILES]
            failed = "; ".join([*reasons[:_NAMED_FILES], *more])
            if not report.passages:
                raise EmptyIndexError(
                    f"{folder} holds no document that can be read" + (f" ({failed})" * bool(failed))
                )
            if failed:
                logger.warning("ragaccel: not read in %s: %s", folder, failed)
            for warning in report.warnings:
                logger.warning("ragaccel: %s", warning)

        return cls._over(llm, path, embedder, index, options)

    @classmethod
    def _over(
        cls,
        llm: LLM | str | Path | None,
        path: str | Path | None,
        embedder: AnyEmbedder,
        index: Callable[[Store, Embedder], Any],
        options: dict[str, Any],
    ) -> RAG:
        """Return a RAG over a store that ``index`` fills, once all arguments are checked."""
        from ragaccel.retrieval.embedder import as_embedder
        from ragaccel.retrieval.retriever import Retriever
        from ragaccel.retrieval.store import Store

        if path is not None and not (isinstance(path, str | os.PathLike) and os.fspath(path)):
            raise ConfigurationError(f"path must be that of an index file, not {brief(path)}")
        store, embedder = Store(path), as_embedder(embedder)
        rag = cls(llm, lambda _: [], **options)  # checked before indexing, which may take long
        index(store, embedder)
        rag.retriever = retriever = Retriever(store, embedder)
        if rag.llm.is_bundled_reader:
            rag.retriever = CompressingRetriever(retriever, sentences=READER_SENTENCES)
        return rag

    def ask(self, question: str, history: History = (), **settings: Unpack[Settings]) -> Answer:
        """Answer a question from the passages retrieved for it.

        If no passage is found, the model is not asked, and ``Answer.refusal`` says so.

        Args:
            question: the question.
            history: the chat so far: messages (``{"role": ..., "content": ...}``), pairs of a
                question and its answer, or questions and answers in turns.
            **settings: those of ``LLM.generate``.

        Raises:
            CapacityError: the question, or each passage by itself, is too long for the context.
        """
        return self.stream(question, history, **settings).finish()

    async def aask(
        self, question: str, history: History = (), **settings: Unpack[Settings]
    ) -> Answer:
        """Answer a question as ``ask`` does, for asyncio; cancelling the task stops it."""
        opened = await run_in_thread(partial(self.stream, question, history, **settings))
        return await await_answer(opened)

    def astream(
        self, question: str, history: History = (), **settings: Unpack[Settings]
    ) -> AsyncStream:
        """Answer a question piece by piece, for asyncio; leaving the loop over it stops it.

        The passages are retrieved, and errors raised, when the first piece is awaited.
        """
        return AsyncStream(partial(self.stream, question, history, **settings))

    def ask_many(
        self, questions: Iterable[str], history: History = (), **settings: Unpack[Settings]
    ) -> list[Answer]:
        """Answer several questions together, in shared passes; return the answers in order.

        Passages are retrieved one question after the other, in this thread. The first error ends
        all answers. ``history`` is the chat before each of them.
        """
        if isinstance(questions, str | Mapping) or not isinstance(questions, Iterable):
            raise ConfigurationError(f"questions must be a list, not {brief(questions)}: call ask")
        questions, messages = list(map(_question, questions)), as_messages(history)
        streams: list[Stream] = []
        with ThreadPoolExecutor(self.llm.scheduler.max_batch, "ragaccel-many") as threads:
            try:
                answers = []
                for question in questions:
                    streams.append(self.stream(question, messages, **settings))
                    answers.append(threads.submit(streams[-1].finish))
                return [answer.result() for answer in answers]
            except BaseException:  # Ctrl-C, too
                threads.shutdown(wait=False, cancel_futures=True)
                for stream in streams:
                    stream.close()
                raise

    def stream(self, question: str, history: History = (), **settings: Unpack[Settings]) -> Stream:
        """Answer a question piece by piece; arguments and errors are those of ``ask``."""
        claim_torch()
        settings = check_settings(settings)
        settings.setdefault("max_new_tokens", self.max_new_tokens)
        messages = as_messages(history)
        prompt = self.prompt(question, messages, max_new_tokens=settings["max_new_tokens"])
        quotes = self._quotes_only
        refusal, sentences = "", list[NearestSentence]()
        if not (prompt.passages or prompt.dropped):
            refusal = NOT_FOUND
        elif self.llm.is_bundled_reader:
            refusal, sentences = refuse(question, messages, prompt.passages, self.retriever)
            refusal = refusal if quotes else ""
        constraint = None
        if self.llm.is_bundled_reader:
            values = values_of(question, sentences)
            constraint = QuoteConstraint(prompt.token_ids, self.llm.tokenizer, values)
            given = settings.get("logits_processors", ())
            settings["logits_processors"] = [*given, constraint]
        if refusal:
            settings |= {"max_new_tokens": 1, "min_new_tokens": 0, "remember": False}
        answers = self.answers if settings.get("remember", True) else None
        if answers is not None:
            _predict_from(answers, question, settings)

        def judged(pieces: Generator[str, None, Answer]) -> Generator[str, None, Answer]:
            is_held_back = quotes or bool(refusal)
            answer = _finished(pieces) if is_held_back else (yield from pieces)
            if answers is not None:
                with _best_effort("cannot remember an answer"):
                    answers.add(question, answer.text, settings.get("namespace", ""))
            if quotes and constraint is not None and not refusal:
                answer = check_quote(answer, question, sentences, constraint)
            else:
                answer = with_refusal(answer, refusal or NOT_TOLD * is_refusal(answer.text))
            if is_held_back and answer.text:
                yield answer.text
            if answer.answered and not quotes:
                return answer
            return with_nearest(answer, question, messages, self.retriever, quotes=quotes)

        return self.llm.stream(prompt, **settings).through(judged)

    def prompt(
        self,
        question: str,
        history: History = (),
        *,
        max_new_tokens: int | None = None,
    ) -> Prompt:
        """Retrieve passages and build the prompt, without generating an answer.

        With a history the model is asked for the full question first (``rewrite``).
        """
        messages = as_messages(history)
        passages = self._search(_question(question), messages)
        context, new = self.llm.context_length, max_new_tokens or self.max_new_tokens
        if self.system and renders_system(self.llm.tokenizer):
            messages = _with_system(self.system, messages)
        elif self.system:
            question = f"{self.system}\n\n{question}"
        return build_prompt(
            self.llm.tokenizer,
            question,
            passages,
            history=messages,
            template=self.template,
            max_tokens=None if context is None else context - new,
        )

    def _search(self, question: str, history: Sequence[Message]) -> list[Passage]:
        """Return passages for the question, interleaved with those for it and the previous one."""
        found = self._retrieve(self._full_question(question, history))
        if found and (whole := with_previous_question(question, history)):
            found = _interleave(found, self._retrieve(whole))[: self.k]
        return found

    def _full_question(self, question: str, history: Sequence[Message]) -> str:
        """Return a question of a chat so that it is understood alone, as the model rewrites it."""
        if not (history and self.rewrite) or self.llm.is_bundled_reader:
            return question
        context = self.llm.context_length
        prompt = build_prompt(
            self.llm.tokenizer,
            _REWRITE.format(question=question.strip()),
            [],
            history=history,
            template=self._asked_alone,
            max_tokens=None if context is None else context - _REWRITE_TOKENS,
        )
        stream = self.llm.stream(
            prompt, max_new_tokens=_REWRITE_TOKENS, temperature=0.0, remember=False
        )
        answer = stream.finish()
        line = answer.text.strip().strip("\"'“”„«» ")
        is_question = answer.finish_reason == "stop" and 0 < len(line) <= _MAX_REWRITTEN
        return line if is_question and "\n" not in line else question

    def _asked_alone(
        self, question: str, _: Sequence[Passage], history: Sequence[Message]
    ) -> str | Sequence[Message]:
        """Return the chat and an instruction as messages, or as text for a model without a chat."""
        if self.llm.tokenizer.has_chat_template:
            return [*history, {"role": "user", "content": question}]
        said = "".join(f"{message['role']}: {message['content']}\n\n" for message in history)
        return f"{said}{question}\n\nQuestion:"

    @property
    def _quotes_only(self) -> bool:
        """Return whether the bundled reader answers and its quotes are checked."""
        return self.check_quotes and self.llm.is_bundled_reader

    def _retrieve(self, query: str) -> list[Passage]:
        """Return the passages for a query, first those in a script that the bundled reader reads.

        If it cannot read some, search more passages for readable ones.
        """
        found = find_passages(self.retriever, query, self.k)
        if self._quotes_only and any(is_foreign(passage.text) for passage in found):
            more = find_passages(self.retriever, query, _SEARCH_FACTOR * self.k)
            found = sorted(more, key=lambda passage: is_foreign(passage.text))[: self.k]
            if found and is_foreign(found[0].text) and not is_foreign(query):
                found = self._readable(query) or found
        return found

    def _readable(self, query: str) -> list[Passage]:
        """Return readable passages that the retriever's ``nearest`` finds; [] if it has none."""
        nearest = getattr(self.retriever, "nearest", None)
        found = [] if nearest is None else nearest(query, _SEARCH_FACTOR * self.k)
        return [one.passage for one in found if not is_foreign(one.passage.text)][: self.k]


def _question(given: Any) -> str:
    """Return the question, or raise ConfigurationError if it is blank or no string."""
    if not text("the question", given).strip():
        raise ConfigurationError("the question is empty")
    return str(given)


def _with_system(system: str, messages: Sequence[Message]) -> list[Message]:
    """Return a chat that begins with one system message: instructions, then the chat's own."""
    own = messages[:1] if messages and messages[0]["role"] == "system" else []
    content = "\n\n".join([system, *(message["content"] for message in own)])
    return [{"role": "system", "content": content}, *messages[len(own) :]]


@contextmanager
def _progress_bar(
    given: Callable[[Progress], None] | None,
) -> Iterator[Callable[[Progress], None]]:
    """Yield the given callback, or one that shows a bar on stderr after two seconds."""
    if given is not None:
        yield given
        return
    from tqdm.auto import tqdm

    with tqdm(desc="indexing", unit="B", unit_scale=True, delay=2.0, disable=None) as bar:

        def tell(progress: Progress) -> None:
            bar.total, bar.n = progress.work_total, progress.work_done
            bar.update(0)

        yield tell


def as_llm(model: LLM | str | Path | None) -> LLM:
    """Return the model, loaded if it is a folder, a name on the hub, or None (see ``LLM.load``)."""
    if model is None or isinstance(model, str | os.PathLike):
        from ragaccel.llm import LLM

        return LLM.load(model)
    if inspect.isclass(model) or not callable(getattr(model, "stream", None)):
        raise ConfigurationError(
            f"llm must be an LLM, or a model's folder or name on the hub, not {brief(model)}: for "
            "a model of transformers, LLM(model, tokenizer)"
        )
    return model


def _predict_from(answers: AnswerMemory, question: str, settings: Settings) -> None:
    """Add earlier answers to similar questions to the predictions."""
    with _best_effort("cannot look up answers to similar questions"):
        similar = answers.similar(question, settings.get("namespace", ""))
        predicted = settings.get("prediction", ())
        settings["prediction"] = (*predicted, *(found.answer for found in similar))


def _finished(pieces: Generator[str, None, Answer]) -> Answer:
    while True:
        try:
            next(pieces)
        except StopIteration as end:  # noqa: PERF203
            answer: Answer = end.value
            return answer


@contextmanager
def _best_effort(failure: str) -> Iterator[None]:
    """Log an error of the ``with`` block instead of raising it: the answer does not need it."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", failure, error)


def _interleave(first: Sequence[Passage], second: Sequence[Passage]) -> list[Passage]:
    """Return the passages of two rankings once each, alternating, best first."""
    ranks: dict[tuple[str, str], tuple[int, int]] = {}
    passage_of: dict[tuple[str, str], Passage] = {}
    for which, ranking in enumerate((first, second)):
        for rank, passage in enumerate(ranking):
            name = passage.passage_id, passage.text  # one retriever's ids may only be ranks
            passage_of.setdefault(name, passage)
            ranks[name] = min(ranks.get(name, (rank, which)), (rank, which))
    return [passage_of[name] for name in sorted(ranks, key=ranks.__getitem__)]


_REWRITE = """\
Write the following question anew, so that it is understood without the conversation above: put in \
what its words refer to. Keep its language, and write only the question.

{question}"""
_REWRITE_TOKENS, _MAX_REWRITTEN = 96, 400  # tokens and characters of a rewritten question
