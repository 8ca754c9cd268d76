"""RAG: retrieve passages for a question, generate an answer from them, and check it.

The bundled reader copies a sentence of the passages even if none of them answers the question, so
its answers are checked. A question counts as not answered if

- the model says so (``NOT_TOLD``; any model);
- the most similar sentence found is less similar to the question than ``FLOOR`` (``NOT_NEAR``);
- the question, or every passage, is in a script that the reader was not trained on
  (``FOREIGN_SCRIPT``);
- the reader's text occurs in no passage, is a heading, or adds no word to the question
  (``NO_QUOTE``).

The second and third are known before generation: one token is generated then, and not shown.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Protocol

from ragaccel.answer import TOKEN_PATTERN
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
from ragaccel.passage import Passage, is_heading, sentence_spans
from ragaccel.paths import claim_torch
from ragaccel.prompt import Prompt, build_prompt, check_history, check_passage
from ragaccel.retrieval.compression import nearest_sentences

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from typing_extensions import Unpack

    from ragaccel.answer import Answer, Stream
    from ragaccel.config import Settings
    from ragaccel.drafting.answer_memory import AnswerMemory
    from ragaccel.llm import LLM
    from ragaccel.passage import NearestSentence
    from ragaccel.prompt import Message, Template
    from ragaccel.retrieval.embedder import Embedder


logger = logging.getLogger("ragaccel")

_SEARCH_FACTOR = 8  # this many times k passages are retrieved if some are unreadable


class PassageSource(Protocol):
    """An object that finds passages for a question: a ``Retriever``, or your own."""

    def search(self, query: str, k: int = ...) -> Sequence[Passage]:
        """Return at most ``k`` passages, best first."""
        ...


class RAG:
    """A model and a retriever that answer questions from retrieved passages.

    Args:
        llm: the model that answers.
        retriever: finds the passages; any object with ``search(query, k)``.
        k: the number of passages to retrieve.
        template: the prompt template; see ``build_prompt``.
        max_new_tokens: the maximum number of tokens of an answer; the prompt leaves room for them.
        answers: a memory of earlier answers; answers to similar questions serve as drafts.
        check_quotes: show the bundled reader's text only if it quotes a passage that is relevant
            to the question (``ragaccel.rag``); otherwise ``Answer.refusal`` gives the reason.
            A checked answer is streamed in one piece. Other models are not checked.
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
                f"a retriever needs a method search(query, k), and {brief(retriever)} has none: "
                "pass a Retriever, or an object of your own with such a method"
            )
        if not (template is None or isinstance(template, str) or callable(template)):
            raise ConfigurationError(
                f"template must be a format string or a function, not {brief(template)}"
            )
        self.llm, self.retriever = llm, retriever
        self.k, self.template, self.max_new_tokens = k, template, max_new_tokens
        self.answers, self.check_quotes = answers, check_quotes

    def ask(
        self, question: str, history: Sequence[Message] = (), **settings: Unpack[Settings]
    ) -> Answer:
        """Answer a question from the passages retrieved for it.

        ``history`` is the chat so far, as messages; ``settings`` are those of ``LLM.generate``.

        Raises:
            EmptyIndexError: the retriever finds no passage.
            CapacityError: the question, or each passage by itself, is too long for the context.
        """
        return self.stream(question, history, **settings).finish()

    def stream(
        self, question: str, history: Sequence[Message] = (), **settings: Unpack[Settings]
    ) -> Stream:
        """Answer a question piece by piece; arguments and errors are those of ``ask``."""
        claim_torch()
        settings = check_settings(settings)
        settings.setdefault("max_new_tokens", self.max_new_tokens)
        prompt = self.prompt(question, history, max_new_tokens=settings["max_new_tokens"])
        quotes = self._quotes_only
        refusal = refuse(question, history, prompt.passages, self.retriever) if quotes else ""
        if refusal:
            settings |= {"max_new_tokens": 1, "min_new_tokens": 0, "remember": False}
        answers = self.answers if settings.get("remember", True) else None
        if answers is not None:
            _predict_from(answers, question, settings)

        def judged(pieces: Generator[str, None, Answer]) -> Generator[str, None, Answer]:
            answer = _finished(pieces) if quotes else (yield from pieces)
            if answers is not None:
                with _best_effort("cannot remember an answer"):
                    answers.add(question, answer.text, settings.get("namespace", ""))
            answer = judge(
                answer, question, history, self.retriever, quotes=quotes, refusal=refusal
            )
            if quotes and answer.text:
                yield answer.text
            return answer

        return self.llm.stream(prompt, **settings).through(judged)

    def prompt(
        self,
        question: str,
        history: Sequence[Message] = (),
        *,
        max_new_tokens: int | None = None,
    ) -> Prompt:
        """Retrieve passages and build the prompt, without generating an answer."""
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
        """Return passages for the question, interleaved with those for it and the previous one."""
        found = self._retrieve(question)
        if found and (whole := with_previous_question(question, history)):
            found = _interleave(found, self._retrieve(whole))[: self.k]
        if not found:
            raise EmptyIndexError(
                "no passage was found to answer from: index a folder first, with "
                "`ragaccel index FOLDER` or ragaccel.index_folder"
            )
        return found

    @property
    def _quotes_only(self) -> bool:
        """Return whether the bundled reader answers and its quotes are checked."""
        return self.check_quotes and self.llm.is_bundled_reader

    def _retrieve(self, query: str) -> list[Passage]:
        """Return the passages for a query, first those in a script that the bundled reader reads.

        If it cannot read some, search more passages for readable ones.
        """
        found = self._search_retriever(query, self.k)
        if self._quotes_only and any(is_foreign(passage.text) for passage in found):
            more = self._search_retriever(query, _SEARCH_FACTOR * self.k)
            found = sorted(more, key=lambda passage: is_foreign(passage.text))[: self.k]
            if is_foreign(found[0].text) and not is_foreign(query):
                found = self._readable(query) or found
        return found

    def _readable(self, query: str) -> list[Passage]:
        """Return readable passages that the retriever's ``nearest`` finds; [] if it has none."""
        nearest = getattr(self.retriever, "nearest", None)
        found = [] if nearest is None else nearest(query, _SEARCH_FACTOR * self.k)
        return [one.passage for one in found if not is_foreign(one.passage.text)][: self.k]

    def _search_retriever(self, query: str, k: int) -> list[Passage]:
        """Search; raise ConfigurationError if the retriever returns anything but passages."""
        found = self.retriever.search(query, k=k)
        listed = list(found) if isinstance(found, Iterable) else [found]
        for passage in listed:
            if not isinstance(passage, Passage):
                raise ConfigurationError(
                    f"{type(self.retriever).__name__}.search must return passages, not "
                    f"{brief(passage)}: make each a Passage(passage_id, text)"
                )
            check_passage(passage)
        return listed


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
    ranks: dict[str, tuple[int, int]] = {}
    passage_of: dict[str, Passage] = {}
    for which, ranking in enumerate((first, second)):
        for rank, passage in enumerate(ranking):
            passage_of.setdefault(passage.passage_id, passage)
            ranks[passage.passage_id] = min(
                ranks.get(passage.passage_id, (rank, which)), (rank, which)
            )
    return [passage_of[name] for name in sorted(ranks, key=ranks.__getitem__)]


REFUSAL = "The passages do not tell."
NOT_TOLD, NOT_NEAR = "not told", "not near"
FOREIGN_SCRIPT, NO_QUOTE = "foreign script", "no quote"

FLOOR = 0.40
"""Lowest cosine of an answered question and its nearest sentence, with the default embedder.

Fitted on development questions by ``python -m eval floor``.
"""

_NUM_NEAREST = 3
_CITATION = re.compile(r"\s*\[\d{1,3}\]\s*\.?$")
_FOREIGN_SHARE = 0.5  # of the letters


def refuse(
    question: str, history: Sequence[Message], passages: Sequence[Passage], source: object
) -> str:
    """Return the reason why the bundled reader must not answer, or "" if it may.

    Args:
        question: The question.
        history: The chat so far, as messages.
        passages: The passages found for the question.
        source: The retriever; its ``embedder`` is reused if that is the default one.
    """
    readable = [passage for passage in passages if not is_foreign(passage.text)]
    if is_foreign(question) or not readable:
        return FOREIGN_SCRIPT
    embedder = _default_embedder(source)
    if embedder is None:
        return ""
    queries = [question, *filter(None, [with_previous_question(question, history)])]
    near = (nearest_sentences(embedder, query, readable) for query in queries)
    best = max((found[0].score for found in near if found), default=0.0)
    return NOT_NEAR if best < FLOOR else ""


def judge(
    answer: Answer,
    question: str,
    history: Sequence[Message],
    source: object,
    *,
    quotes: bool,
    refusal: str = "",
) -> Answer:
    """Return the answer with ``refusal`` set, and the nearest sentences if it is refused.

    Args:
        answer: The model's answer.
        question: The question.
        history: The chat so far, as messages.
        source: The retriever. The nearest sentences are those of its ``nearest(query)`` if it has
            that method, else those of the answer's passages by its ``embedder``.
        quotes: Whether the model is the bundled reader, which must quote.
        refusal: The reason found before generation (see ``refuse``).
    """
    readable = tuple(passage for passage in answer.passages if not is_foreign(passage.text))
    if is_refusal(answer.text):
        refusal = refusal or NOT_TOLD
    elif (
        quotes
        and not refusal
        and not (is_quote(answer.text, readable) and adds_words(answer.text, question))
    ):
        refusal = NO_QUOTE
    if not refusal:
        return answer
    query = with_previous_question(question, history) or question
    nearest = _nearest(answer, query, source, quotes=quotes)
    if quotes and refusal != FOREIGN_SCRIPT:
        nearest = [one for one in nearest if not is_foreign(one.passage.text)]
        nearest = nearest or _nearest(
            replace(answer, passages=readable), query, None, quotes=quotes
        )
    if refusal != NOT_TOLD:
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
    words, asked = _words(_CITATION.sub("", text)), _words(question)
    return (
        len(words) > 1
        and any(character.isalpha() for word in words for character in word)
        and not words <= asked
    )


def is_foreign(text: str) -> bool:
    """Return whether most letters of a text are not Latin, the script that the reader reads."""
    letters = [character for character in text if character.isalpha()]
    return sum(not _is_latin(letter) for letter in letters) > _FOREIGN_SHARE * len(letters)


@cache
def _is_latin(letter: str) -> bool:
    return letter.isascii() or unicodedata.name(letter, "").startswith(("LATIN", "FULLWIDTH LATIN"))


def _is_heading_of(said: str, text: str) -> bool:
    return any(
        is_heading(text, start, end)
        for start, end in sentence_spans(text)
        if _normalized(text[start:end]) == said
    )


def _words(text: str) -> set[str]:
    return {word.casefold() for word in TOKEN_PATTERN.findall(text) if any(map(str.isalnum, word))}


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
