"""RAG: retrieve passages for a question, generate an answer from them, and check it.

The bundled reader copies a sentence of the passages even if none of them answers the question, so
its answers are checked. A question counts as not answered if

- the retriever finds no passage (``NOT_FOUND``; any model);
- the model says so (``NOT_TOLD``; any model);
- the question, or every passage, is not in English (``NOT_ENGLISH``);
- the most similar sentence found is less similar to the question than ``FLOOR`` (``NOT_NEAR``);
- the reader's text occurs in no passage, is a heading, or adds no word to the question
  (``NO_QUOTE``);
- the signs that it is an answer are too few (``NOT_SURE``, see ``is_likely_answer``), or the
  reader quotes another sentence than the most similar one (``NOT_SURE``).

``NOT_FOUND``, ``NOT_ENGLISH``, ``NOT_NEAR`` and some of ``NOT_SURE`` are known before generation:
one token is generated then, and not shown.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ragaccel.answer import AsyncStream, await_answer, run_in_thread
from ragaccel.config import check_settings
from ragaccel.errors import (
    ConfigurationError,
    EmptyIndexError,
    MissingExtraError,
    ModelNotFoundError,
    brief,
    positive,
    text,
)
from ragaccel.passage import as_document, is_heading, sentence_spans
from ragaccel.paths import claim_torch
from ragaccel.prompt import Prompt, as_messages, build_prompt, check_template, renders_system
from ragaccel.retrieval.compression import CompressingRetriever, nearest_sentences
from ragaccel.retrieval.language import content_words, is_english, is_foreign, words_of
from ragaccel.retrieval.source import as_source, find_passages

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from ragaccel.answer import Answer, Stream
    from ragaccel.config import Settings
    from ragaccel.drafting.answer_memory import AnswerMemory
    from ragaccel.llm import LLM
    from ragaccel.passage import NearestSentence, Passage
    from ragaccel.prompt import History, Message, Template
    from ragaccel.retrieval.embedder import AnyEmbedder, Embedder
    from ragaccel.retrieval.indexing import Progress
    from ragaccel.retrieval.source import PassageSource
    from ragaccel.retrieval.store import Store


logger = logging.getLogger("ragaccel")

_SEARCH_FACTOR = 8  # this many times k passages are retrieved if some are unreadable
# for the bundled reader, chosen on held-out questions: python -m eval questions --held-out
_READER_SENTENCES, _READER_MARGIN = 1, 0.05


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
            to the question (``ragaccel.rag``); otherwise ``Answer.refusal`` gives the reason.
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
            if not report.passages:
                failed = "; ".join(f"{path}: {reason}" for path, reason in report.failed.items())
                raise EmptyIndexError(
                    f"{folder} holds no document that can be read" + (f" ({failed})" * bool(failed))
                )

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
            rag.retriever = CompressingRetriever(
                retriever, sentences=_READER_SENTENCES, margin=_READER_MARGIN
            )
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
        if not (prompt.passages or prompt.dropped):
            refusal, best = NOT_FOUND, None
        elif quotes:
            refusal, best = refuse(question, messages, prompt.passages, self.retriever)
        else:
            refusal, best = "", None
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
            if quotes and not refusal:
                refused = check_quote(answer, question, best)
            else:
                refused = refusal or NOT_TOLD * is_refusal(answer.text)
            answer = judge(answer, question, messages, self.retriever, refused, quotes=quotes)
            if is_held_back and answer.text:
                yield answer.text
            return answer

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

REFUSAL = "The passages do not tell."
NOT_FOUND = "not found"
NOT_TOLD, NOT_NEAR = "not told", "not near"
NOT_ENGLISH, NO_QUOTE, NOT_SURE = "not English", "no quote", "not sure"

FLOOR = 0.40
"""Lowest cosine of an answered question and its nearest sentence, with the default embedder.

Fitted on development questions by ``python -m eval floor``.
"""
QUOTE_RULES = ((0.70, 2 / 3), (0.55, 1.0))
"""A quote needs one of these: a lowest cosine, and a share of the question's content words.

Fitted on development questions by ``python -m eval quotes``.
"""

_NUM_NEAREST = 6
_CITATION = re.compile(r"\s*\[\d{1,3}\]\s*\.?$")
_NUMBER = (
    r"\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|hundred|thousand|once"
    r"|twice|half|no)\b"
)
_TIME = (
    r"\d|\b(?:(?:mon|tues|wednes|thurs|fri|satur|sun)days?|january|february|march|april|may|june"
    r"|july|august|september|october|november|december|noon|midnight|morning|evening|spring|summer"
    r"|autumn|winter|daily|weekly|monthly|yearly|every|after|before|until|when|while|during)\b"
)
_EXPECTED = (
    (r"\b(?:when|(?:what|which) (?:year|day|date|time|month))\b", _TIME),
    (
        r"\b(?:how (?:many|much|long|old|far|high|tall|big|large|often|heavy|deep|wide|fast|hot)"
        r"|what (?:percent\w*|number|temperature)|cost|price)\b",
        _NUMBER,
    ),
)
"""(question, answer): what the answer to a question of a kind must contain."""


def refuse(
    question: str, history: Sequence[Message], passages: Sequence[Passage], source: object
) -> tuple[str, NearestSentence | None]:
    """Return why the bundled reader must not answer ("" if it may), and the nearest sentence.

    Args:
        question: The question.
        history: The chat so far, as messages.
        passages: The passages found for the question.
        source: The retriever; its ``embedder`` is reused if that is the default one.
    """
    readable = [passage for passage in passages if is_english(passage.text)]
    if not is_english(question) or not readable:
        return NOT_ENGLISH, None
    embedder = _default_embedder(source)
    if embedder is None:
        return "", None
    queries = [question, *filter(None, [with_previous_question(question, history)])]
    near = (nearest_sentences(embedder, query, passages) for query in queries)
    best = max((found[0] for found in near if found), key=lambda one: one.score, default=None)
    if best is None or best.score < FLOOR:
        return NOT_NEAR, best
    if not is_english(best.text):
        return NOT_ENGLISH, best
    return ("" if any(is_likely_answer(query, best) for query in queries) else NOT_SURE), best


def check_quote(answer: Answer, question: str, best: NearestSentence | None) -> str:
    """Return why the bundled reader's text is not shown, or "" if it is.

    ``best`` is the sentence nearest to the question, or None without an embedder.
    """
    if is_refusal(answer.text):
        return NOT_TOLD
    readable = [passage for passage in answer.passages if is_english(passage.text)]
    if not (is_quote(answer.text, readable) and adds_words(answer.text, question)):
        return NO_QUOTE
    return "" if best is None or is_same_sentence(answer.text, best) else NOT_SURE


def is_same_sentence(quote: str, best: NearestSentence) -> bool:
    """Return whether a quote is, contains or is part of the sentence nearest to the question."""
    said, nearest = _normalized(_CITATION.sub("", quote)), _normalized(best.text)
    return said in nearest or nearest in said


def is_likely_answer(question: str, best: NearestSentence) -> bool:
    """Return whether several signs say that the sentence nearest to a question answers it.

    It fits one of ``QUOTE_RULES``, and it holds what the kind of question asks for, such as a
    number after "how many" or a name after "who".
    """
    share = share_of_words(question, best)
    fits = any(best.score >= least and share >= needed for least, needed in QUOTE_RULES)
    return fits and holds_what_is_asked(question, best)


def share_of_words(question: str, best: NearestSentence) -> float:
    """Return the share of a question's content words in a sentence and its passage's title."""
    asked, told = content_words(question), content_words(f"{best.passage.title}\n{best.text}")
    return len(asked & told) / len(asked) if asked else 0.0


def holds_what_is_asked(question: str, best: NearestSentence) -> bool:
    """Return whether a sentence holds a number, a time or a name if the question asks for one."""
    asked, sentence = question.casefold(), _normalized(best.text)
    for kind, expected in _EXPECTED:
        if re.search(kind, asked):
            return bool(re.search(expected, sentence, re.IGNORECASE))
    if re.match(r"(?:who|whom|whose|by whom)\b", asked):
        names = re.findall(r"\b[^\W\d_a-z][\w’'-]+", sentence)
        return any(name.casefold() not in asked and content_words(name) for name in names)
    return True


def judge(
    answer: Answer,
    question: str,
    history: Sequence[Message],
    source: object,
    refusal: str,
    *,
    quotes: bool,
) -> Answer:
    """Return the answer with ``refusal`` set and, if it is refused or a quote, ``nearest``.

    Args:
        answer: The model's answer.
        question: The question.
        history: The chat so far, as messages.
        source: The retriever. The nearest sentences are those of its ``nearest(query)`` if it has
            that method, else those of the answer's passages by its ``embedder``.
        refusal: The reason why the question is not answered, or "".
        quotes: Whether the model is the bundled reader, which must quote.
    """
    if not (refusal or quotes):
        return answer
    query = with_previous_question(question, history) or question
    nearest = _nearest(answer, query, source, quotes=quotes)
    if quotes and not is_foreign(question):
        latin = [one for one in nearest if not is_foreign(one.passage.text)]
        readable = tuple(passage for passage in answer.passages if not is_foreign(passage.text))
        answered = replace(answer, passages=readable)
        nearest = latin or _nearest(answered, query, None, quotes=True) or nearest
    if refusal not in ("", NOT_TOLD):
        answer = replace(answer, text=REFUSAL, copied_spans=())
    return replace(answer, refusal=refusal, nearest=tuple(nearest[:_NUM_NEAREST]))


def is_refusal(text: str) -> bool:
    """Return whether a model says that the passages hold no answer."""
    return text.strip().rstrip(".") == REFUSAL.rstrip(".")


def with_previous_question(question: str, history: Sequence[Message]) -> str:
    """Return the previous question and this one as a query, or "" if this is the first one.

    A question such as "And who built it?" finds nothing alone.
    """
    asked = [message["content"] for message in history if message.get("role") == "user"]
    return f"{asked[-1]} {question}" if asked else ""


def is_quote(text: str, passages: Sequence[Passage]) -> bool:
    """Return whether a text, without its citation, occurs in a passage and is not a heading."""
    said = _normalized(_CITATION.sub("", text))
    return bool(said) and any(
        said in _normalized(passage.text) and not _is_heading_of(said, passage.text)
        for passage in passages
    )


def adds_words(text: str, question: str) -> bool:
    """Return whether a quote has at least two words, a letter, and a word not in the question."""
    words, asked = words_of(_CITATION.sub("", text)), words_of(question)
    return (
        len(words) > 1
        and any(character.isalpha() for word in words for character in word)
        and not words <= asked
    )


def _is_heading_of(said: str, text: str) -> bool:
    return any(
        is_heading(text, start, end)
        for start, end in sentence_spans(text)
        if _normalized(text[start:end]) == said
    )


def _normalized(text: str) -> str:
    return " ".join(text.split())


def _nearest(
    answer: Answer, query: str, source: object, *, quotes: bool
) -> Sequence[NearestSentence]:
    search = getattr(source, "nearest", None)
    if search is not None:
        found: Sequence[NearestSentence] = search(query)
        return found
    embedder = _default_embedder(source) if quotes else getattr(source, "embedder", None)
    return [] if embedder is None else nearest_sentences(embedder, query, answer.passages)


def _default_embedder(source: object) -> Embedder | None:
    """Return the default embedder, reusing the retriever's if equal; None if not installed."""
    own: Embedder | None = getattr(source, "embedder", None)
    try:
        default = _default()
    except (ModelNotFoundError, MissingExtraError):
        return None
    return own if own is not None and own.fingerprint == default.fingerprint else default


@cache
def _default() -> Embedder:
    from ragaccel.retrieval.embedder import load_embedder

    return load_embedder()
