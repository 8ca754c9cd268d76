"""RAG: a question becomes an answer from passages; the one file that sees both halves."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ragaccel.config import check_settings, remembers
from ragaccel.errors import ConfigurationError, EmptyIndexError, brief, positive, text
from ragaccel.passage import Passage
from ragaccel.paths import claim_torch
from ragaccel.prompt import Prompt, as_texts, build_prompt, check_history, check_passage
from ragaccel.quotes import is_foreign, judge, refuse, with_previous_question

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from typing_extensions import Unpack

    from ragaccel.answer import Answer, Stream
    from ragaccel.config import Settings
    from ragaccel.drafting.answer_memory import AnswerMemory
    from ragaccel.llm import LLM
    from ragaccel.prompt import Message, Template

logger = logging.getLogger("ragaccel")

_SEARCH_FACTOR = 8  # times as many are looked at where the reader cannot read some


class PassageSource(Protocol):
    """Whatever finds passages for a question: a ``Retriever``, or your own."""

    def search(self, query: str, k: int = ...) -> Sequence[Passage]:
        """Return at most ``k`` passages, the best first."""
        ...


class RAG:
    """Answers questions from retrieved passages.

    Args:
        llm: the model that answers.
        retriever: where passages come from; anything with ``search(query, k)``.
        k: how many passages to ask for.
        template: how the prompt is written; see ``build_prompt``.
        max_new_tokens: most tokens of an answer, kept free in the context.
        answers: remembers what was answered; answers to similar questions are guessed from.
        check_quotes: pass on what the bundled reader says only where it quotes a passage that is
            near to the question (``ragaccel.quotes``); ``Answer.refusal`` says why else. Its answer
            comes in one piece then. Other models are not checked.
    """

    def __init__(
        self,
        llm: LLM,
        retriever: PassageSource,
        *,
        k: int = 6,
        template: Template | None = None,
        max_new_tokens: int = 256,
        answers: AnswerMemory | None = None,
        check_quotes: bool = True,
    ) -> None:
        k, max_new_tokens = positive("k", k), positive("max_new_tokens", max_new_tokens)
        if not callable(getattr(retriever, "search", None)):
            raise ConfigurationError(
                f"a retriever has search(query, k), which {brief(retriever)} has not: give a "
                "Retriever, or an object of your own with such a method"
            )
        if not (template is None or isinstance(template, str) or callable(template)):
            raise ConfigurationError(
                f"template is a format string or a function, not {brief(template)}"
            )
        self.llm, self.retriever = llm, retriever
        self.k, self.template, self.max_new_tokens = k, template, max_new_tokens
        self.answers, self.check_quotes = answers, check_quotes

    def ask(
        self, question: str, history: Sequence[Message] = (), **settings: Unpack[Settings]
    ) -> Answer:
        """Answer a question from the passages found for it.

        ``history`` is the chat so far, as messages; ``settings`` are those of ``LLM.generate``.

        Raises:
            EmptyIndexError: there is no passage to answer from.
            CapacityError: the question, or every single passage, is too long for the context.
        """
        return self.stream(question, history, **settings).finish()

    def stream(
        self, question: str, history: Sequence[Message] = (), **settings: Unpack[Settings]
    ) -> Stream:
        """Answer piece by piece; arguments and errors are those of ``ask``."""
        claim_torch()
        settings = check_settings(settings)
        settings.setdefault("max_new_tokens", self.max_new_tokens)
        prompt = self.prompt(question, history, max_new_tokens=settings["max_new_tokens"])
        quotes = self._quotes_only
        refusal = refuse(question, history, prompt.passages, self.retriever) if quotes else ""
        if refusal:
            settings |= {"max_new_tokens": 1, "min_new_tokens": 0, "remember": False}
        if self.answers is None or not remembers(settings):
            stream = self.llm.stream(prompt, **settings)
        else:
            stream = self._stream_with_memory(self.answers, question, prompt, settings)

        return self._judge_stream(stream, question, history, quotes=quotes, refusal=refusal)

    def _judge_stream(
        self,
        stream: Stream,
        question: str,
        history: Sequence[Message],
        *,
        quotes: bool,
        refusal: str,
    ) -> Stream:
        """Stream what answers the question; a quote comes when it is known to be one."""

        def pieces() -> Generator[str, None, Answer]:
            with stream:
                for piece in stream:
                    if not quotes:
                        yield piece
                answer = judge(
                    stream.answer,
                    question,
                    history,
                    self.retriever,
                    quotes=quotes,
                    refusal=refusal,
                )
                if quotes and answer.text:
                    yield answer.text
                return answer

        return stream.with_pieces(pieces())

    def _stream_with_memory(
        self, answers: AnswerMemory, question: str, prompt: Prompt, settings: Settings
    ) -> Stream:
        """Stream an answer that similar ones are guesses for, and remember it when it is whole."""
        namespace = settings.get("namespace") or ""
        similar: list[str] = []
        with _best_effort("answers to similar questions are not looked up"):
            similar = [found.answer for found in answers.similar(question, namespace)]
        predicted = as_texts("prediction", settings.get("prediction") or ())
        settings["prediction"] = (*predicted, *similar)
        stream = self.llm.stream(prompt, **settings)

        def pieces() -> Generator[str, None, Answer]:
            with stream:
                yield from stream
                answer = stream.answer
                with _best_effort("an answer is not remembered"):
                    answers.add(question, answer.text, namespace)
                return answer

        return stream.with_pieces(pieces())

    def prompt(
        self,
        question: str,
        history: Sequence[Message] = (),
        *,
        max_new_tokens: int | None = None,
    ) -> Prompt:
        """Find passages and write the prompt, without answering it."""
        if not text("the question", question).strip():
            raise ConfigurationError("the question is empty")
        check_history(history)
        context, new = self.llm.context_length, max_new_tokens or self.max_new_tokens
        return build_prompt(
            self.llm.tokenizer,
            question,
            self._search(question, history),
            history=history,
            template=self.template,
            max_tokens=None if context is None else context - new,
        )

    def _search(self, question: str, history: Sequence[Message]) -> list[Passage]:
        """The passages for a question, and for what it may follow on from ("And who built it?")."""
        found = self._retrieve(question)
        if found and (whole := with_previous_question(question, history)):
            found = _interleave(found, self._retrieve(whole))[: self.k]
        if not found:
            raise EmptyIndexError(
                "there is no passage to answer from: index a folder first, with "
                "`ragaccel index FOLDER` or ragaccel.index_folder"
            )
        return found

    @property
    def _quotes_only(self) -> bool:
        """Whether it is the bundled reader that answers, of which quotes are wanted."""
        return self.check_quotes and self.llm.is_bundled_reader

    def _retrieve(self, query: str) -> list[Passage]:
        """The passages for a query; of those that the bundled reader cannot read, few or none.

        Where some are found, those that it can read come first, also from behind them.
        """
        found = self._search_retriever(query, self.k)
        if self._quotes_only and any(is_foreign(passage.text) for passage in found):
            more = self._search_retriever(query, _SEARCH_FACTOR * self.k)
            found = sorted(more, key=lambda passage: is_foreign(passage.text))[: self.k]
            if is_foreign(found[0].text) and not is_foreign(query):
                found = self._readable(query) or found
        return found

    def _readable(self, query: str) -> list[Passage]:
        """What can be read of what is nearest, where the retriever leaves it out beside nearer."""
        nearest = getattr(self.retriever, "nearest", None)
        found = [] if nearest is None else nearest(query, _SEARCH_FACTOR * self.k)
        return [one.passage for one in found if not is_foreign(one.passage.text)][: self.k]

    def _search_retriever(self, query: str, k: int) -> list[Passage]:
        """What the retriever finds, which must be passages."""
        found = self.retriever.search(query, k=k)
        listed = list(found) if isinstance(found, Iterable) else [found]
        for passage in listed:
            if not isinstance(passage, Passage):
                raise ConfigurationError(
                    f"{type(self.retriever).__name__}.search returns {brief(passage)} where a "
                    "Passage is wanted: Passage(passage_id, text)"
                )
            check_passage(passage)
        return listed


@contextmanager
def _best_effort(failure: str) -> Iterator[None]:
    """Go on without what is only a help; a log says what failed."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", failure, error)


def _interleave(first: Sequence[Passage], second: Sequence[Passage]) -> list[Passage]:
    """Two rankings as one, the best of each in turn, every passage once."""
    ranks: dict[str, tuple[int, int]] = {}
    passage_of: dict[str, Passage] = {}
    for which, ranking in enumerate((first, second)):
        for rank, passage in enumerate(ranking):
            passage_of.setdefault(passage.passage_id, passage)
            ranks[passage.passage_id] = min(
                ranks.get(passage.passage_id, (rank, which)), (rank, which)
            )
    return [passage_of[name] for name in sorted(ranks, key=ranks.__getitem__)]
